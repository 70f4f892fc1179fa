"""`python -m tests.servers.test_config_reference` writes `docs/reference/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentloop_servers.config.engines import EngineConfig, EngineEntry
from agentloop_servers.config.service import NamedModel, ServiceConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration

Every key of a service's YAML file, for operators. The page is generated from the models that validate the file;
other keys are refused. [Operations](../guides/operations.md), [models](../guides/models.md) and
[engines](../guides/engines.md) explain when to set a key.
"""


def page() -> str:
    sections: dict[str, type[BaseModel]] = {"": ServiceConfig}
    sections |= dict(_nested(ServiceConfig))
    return "\n".join([HEAD, *(_section(path, model) for path, model in sections.items())])


def _nested(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            yield f"{prefix}{name}", inner
            if inner is not NamedModel:
                yield from _nested(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _section(path: str, model: type[BaseModel]) -> str:
    title = f"## `{path}`" if path else "## The service"
    fields = model.model_fields
    about = [(model.__doc__ or "").split("\n\n")[0].strip()]
    if model is EngineEntry:
        about.append("Beside these, every key of `engine`.")
        fields = {name: field for name, field in fields.items() if name not in EngineConfig.model_fields}
    if model is NamedModel:
        about.append("Beside these, every key that the service has down to `max_pause_s`.")
        fields = {name: field for name, field in fields.items() if name in model.__annotations__}
    # One line per row.
    meanings = {name: " ".join((field.description or "").split()) for name, field in fields.items()}
    rows = [f"| `{name}` | {_default(field)} | {meanings[name]} |" for name, field in fields.items()]
    return "\n".join([title, "", " ".join(about), "", "| key | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel) or value is None or value in ({}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_every_key_says_what_it_means():
    for model in (ServiceConfig, *(inner for _, inner in _nested(ServiceConfig))):
        assert [name for name, field in model.model_fields.items() if not field.description] == [], model


def test_the_page_is_what_the_models_say():
    assert PAGE.read_text() == page(), "python -m tests.servers.test_config_reference"


if __name__ == "__main__":
    PAGE.write_text(page())
