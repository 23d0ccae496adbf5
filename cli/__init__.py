"""The command line: a typer app, one thin module a command."""
