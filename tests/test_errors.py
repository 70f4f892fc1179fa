"""Every error keeps its class, text and param through pickling (Ray) and through the HTTP envelope."""

import pickle

import pytest

from agentloop import errors
from agentloop.errors import AgentLoopError, from_wire


def every_error(cls: type[AgentLoopError] = AgentLoopError) -> list[type[AgentLoopError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize("cls", every_error())
def test_errors_survive(cls):
    error = cls("what happened", param="tasks")
    for copy in (pickle.loads(pickle.dumps(error)), from_wire(error.to_wire(), error.http_status)):
        assert type(copy) is cls
        assert str(copy) == "what happened"
        assert copy.param == "tasks"


def test_codes_are_unique():
    codes = [cls.code for cls in every_error()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (None, 503, errors.ServiceUnavailable),
        ({"detail": "Not Found"}, 404, errors.NotFound),
        ({"error": "Unauthorized"}, 401, errors.Unauthorized),
        ("text", 418, errors.InvalidRequest),
        ({"error": {"message": "x", "code": "of tomorrow"}}, 500, AgentLoopError),
    ],
)
def test_foreign_bodies_are_classed_by_status(body, status, expected):
    assert type(from_wire(body, status)) is expected


def test_the_tree_in_the_docstring_is_the_tree():
    named = {line.split("─ ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    ours = {cls.__name__ for cls in every_error() if cls.__module__ == errors.__name__}
    assert named == ours - {"AgentLoopError"}
