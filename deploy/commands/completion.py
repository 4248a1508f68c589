"""``sluice completion``: the script that completes commands in a shell."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands in a shell.

    \b
    Examples:
      eval "$(sluice completion bash)"
      sluice completion fish > ~/.config/fish/completions/sluice.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(click.Group(), {}, "sluice", "_SLUICE_COMPLETE").source())
