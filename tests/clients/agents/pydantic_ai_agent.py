"""pydantic-ai: free text, then structured output."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from support import QUESTION, Expression, Session, calculate, service_url


def model_of(session: Session) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    return OpenAIChatModel("default", provider=provider)


def with_a_tool(url: str) -> None:
    """Run the agent once, until its final text."""
    session = Session(url, "pydantic-ai")
    agent = Agent(model_of(session), model_settings=ModelSettings(temperature=0, max_tokens=96), retries=3)

    @agent.tool_plain
    def calculator(expression: Expression) -> str:
        """Evaluate an arithmetic expression."""
        return calculate(expression)

    result = agent.run_sync(QUESTION)
    session.report(sum(message.kind == "response" for message in result.all_messages()))


class Verdict(BaseModel):
    """The required type of the agent's result."""

    is_expensive: bool


def structured(url: str) -> None:
    """Run twice over one history. A typed result is a tool whose call is required, so decoding is constrained."""
    session = Session(url, "pydantic-ai, structured output")
    agent = Agent(model_of(session), output_type=Verdict, model_settings=ModelSettings(max_tokens=96))
    first = agent.run_sync(QUESTION)
    second = agent.run_sync("Are you sure?", message_history=first.all_messages())
    assert isinstance(second.output, Verdict)
    num_turns = sum(message.kind == "response" for message in second.all_messages())
    assert num_turns >= 2
    session.report(num_turns)


if __name__ == "__main__":
    with_a_tool(service_url())
    structured(service_url())
