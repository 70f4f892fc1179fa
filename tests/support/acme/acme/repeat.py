"""A command."""

import typer

app = typer.Typer()


@app.callback()
def group() -> None: ...


@app.command()
def repeat(name: str) -> None:
    print(f"repeats {name}")
