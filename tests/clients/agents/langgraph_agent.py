"""A LangGraph tool loop on langchain-openai, invoked and streamed."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from support import QUESTION, Expression, Session, calculate, service_url


@tool
def calculator(expression: Expression) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def run(url: str, label: str, *, streaming: bool) -> None:
    """One agent run with a tool."""
    session = Session(url, label)
    model = ChatOpenAI(
        model="default",
        base_url=session.base_url,
        api_key=session.api_key,
        temperature=0,
        max_completion_tokens=96,
        streaming=streaming,
    )

    def policy(state: MessagesState) -> dict:
        """The first turn must call the tool; later ones may."""
        choice = "any" if len(state["messages"]) == 1 else "auto"
        return {"messages": [model.bind_tools([calculator], tool_choice=choice).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("policy", policy)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "policy")
    graph.add_conditional_edges("policy", tools_condition)
    graph.add_edge("tools", "policy")
    state = graph.compile().invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 12})
    num_turns = sum(message.type == "ai" for message in state["messages"])
    assert num_turns >= 2, state
    session.report(num_turns)


if __name__ == "__main__":
    run(service_url(), "langgraph", streaming=False)
    run(service_url(), "langgraph, streaming", streaming=True)
