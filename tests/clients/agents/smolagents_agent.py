"""smolagents: content as lists, stop strings appended to history, and tool calls rewritten as text."""

from typing import get_args

from smolagents import OpenAIModel, Tool, ToolCallingAgent
from support import QUESTION, Expression, Session, calculate, service_url


class Calculator(Tool):
    """The tool, in the form that smolagents requires."""

    name = "calculator"
    description = "Evaluate an arithmetic expression."
    inputs = {  # noqa: RUF012 - smolagents reads a plain dict
        "expression": {"type": "string", "description": "An expression.", "enum": list(get_args(Expression))}
    }
    output_type = "string"

    def forward(self, expression):
        return calculate(expression)


def main() -> None:
    """Run a step, a second one over the history that smolagents rewrote as text, and its fallback: a new prompt."""
    session = Session(service_url(), "smolagents", ["history_edit", "system_changed"])
    model = OpenAIModel(
        "default", api_base=session.base_url, api_key=session.api_key, temperature=0.0, max_completion_tokens=96
    )
    agent = ToolCallingAgent(tools=[Calculator()], model=model, max_steps=2, verbosity_level=0)
    agent.run(QUESTION)
    session.report(3)


if __name__ == "__main__":
    main()
