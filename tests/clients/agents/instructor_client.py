"""instructor: a typed answer by a forced tool, complete and in parts, and by a JSON schema."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from support import Session, service_url


class Fact(BaseModel):
    """The required type of the answer."""

    city: Literal["Paris", "Rome"]
    is_large: bool


ASKED = {
    "model": "default",
    "messages": [{"role": "user", "content": "Name a city."}],
    "max_tokens": 200,
    "seed": 3,
}


def client_of(session: Session, mode: instructor.Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    return instructor.from_openai(client, mode=mode)


def whole(url: str, mode: instructor.Mode) -> None:
    """Request one answer."""
    session = Session(url, f"instructor, {mode.value}")
    assert isinstance(client_of(session, mode).create(response_model=Fact, max_retries=0, **ASKED), Fact)
    session.report(1)


def partial(url: str) -> None:
    """The parts of a streamed call grow to the complete call."""
    session = Session(url, "instructor, partial")
    parts = list(
        client_of(session, instructor.Mode.TOOLS).create_partial(response_model=Fact, max_retries=0, **ASKED)
    )
    assert Fact.model_validate(parts[-1].model_dump()).city in ("Paris", "Rome")
    session.report(1)


if __name__ == "__main__":
    whole(service_url(), instructor.Mode.TOOLS)
    whole(service_url(), instructor.Mode.JSON_SCHEMA)
    partial(service_url())
