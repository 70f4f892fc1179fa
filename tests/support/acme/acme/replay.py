"""A command."""

import typer

app = typer.Typer()


@app.callback()
def group() -> None: ...


@app.command()
def replay(name: str) -> None:
    print(f"replays {name}")
