"""LangGraph: an outer graph asks a subgraph with its own messages, and answers with its result."""

import sys
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph


class Outer(TypedDict):
    """The state of the outer graph."""

    question: str
    plan: str
    finding: str
    answer: str


def main(base_url: str, api_key: str) -> None:
    model = ChatOpenAI(model="default", base_url=base_url, api_key=api_key)
    inner = StateGraph(MessagesState)
    inner.add_node("look", lambda state: {"messages": [model.invoke(state["messages"])]})
    inner.add_node("report", lambda state: {"messages": [model.invoke([*state["messages"], ("user", "Report.")])]})
    inner.add_edge(START, "look")
    inner.add_edge("look", "report")
    helper = inner.compile()

    def plan(state: Outer) -> dict:
        return {"plan": model.invoke([("user", state["question"])]).content}

    def ask(state: Outer) -> dict:
        found = helper.invoke({"messages": [("user", "Helper: count the files.")]})
        return {"finding": found["messages"][-1].content}

    def answer(state: Outer) -> dict:
        history = [("user", state["question"]), ("assistant", state["plan"]), ("user", state["finding"])]
        return {"answer": model.invoke(history).content}

    outer = StateGraph(Outer)
    outer.add_node("planning", plan)
    outer.add_node("asking", ask)
    outer.add_node("answering", answer)
    outer.add_edge(START, "planning")
    outer.add_edge("planning", "asking")
    outer.add_edge("asking", "answering")
    print(outer.compile().invoke({"question": "How many files are there?"})["answer"])


if __name__ == "__main__":
    main(*sys.argv[1:])
