"""`shoal`, the command line. Each verb has a file in `commands/`, which is imported when the verb is used: help and
completion have to be there at once."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise

import click

from shoal.cli.examples import FIRST
from shoal.cli.grouped_help import GroupedHelp
from shoal.cli.verbs import GROUPS
from shoal.cli.wrong_word import refusal_of
from shoal.types.codes import Code, Refusal, ShoalError, refuse

PLANNED_VERBS: dict[str, str] = {
    "simulate": "simulator",
}
"""Verbs that a later release adds, and with which feature."""


class Verbs(GroupedHelp):
    """Reports a planned verb as planned rather than unknown."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in PLANNED_VERBS:
            raise refuse(
                Code.NOT_SUPPORTED_YET,
                f"shoal {args[0]}",
                "a verb of this release",
                f"it comes with: {PLANNED_VERBS[args[0]]}",
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    groups=GROUPS,
    examples=FIRST,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SHOAL"},
)
@click.version_option(package_name="shoal-orchestrator", message="shoal %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def shoal(ctx: click.Context, debug: bool) -> None:
    """Place ONNX models on whatever can run them, and see why they are where they are."""
    ctx.meta["shoal.debug"] = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command line.

    Every error is on stderr: what was found, wanted and can be tried, with the code at the end, a line each on a
    terminal and one line in a pipe; or a JSON object with `-o json`. The status is 255, or 2 with USAGE if the command
    line cannot be parsed.
    """
    debug = "--debug" in sys.argv
    _open_closed_output()
    try:
        status = shoal(standalone_mode=False, prog_name="shoal") or 0
        sys.stdout.flush()  # here, where a full disk still gets an answer
        sys.exit(status)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())  # a group without a verb, e.g. `shoal` alone
    except click.ClickException as error:
        fail(refusal_of(error), error.exit_code)
    except ShoalError as error:
        if debug:
            raise
        fail(error.refusal)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our pipe has seen enough.
        _drop_output()
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if debug:
            raise
        _drop_output()
        fail(_of_the_machine(error))
    except UnicodeEncodeError as error:
        if debug:
            raise
        fail(_of_the_encoding(error))
    except Exception as error:
        if debug:
            raise
        fail(Refusal(Code.INTERNAL, f"{type(error).__name__}: {error}", "", "run again with --debug and report it"))


def fail(refusal: Refusal, status: int = 255) -> None:
    """Print the refusal on stderr, or a JSON object if the command was asked for JSON."""
    if _wants_json(sys.argv):
        parts = {"code": refusal.code, "found": refusal.found, "wanted": refusal.asked, "try": refusal.remedy}
        print(json.dumps({"error": parts}), file=sys.stderr)
    else:
        from shoal.cli.render.output import show_refusal  # only then: rich takes a while to import

        show_refusal(refusal)
    sys.exit(status)


def _open_closed_output() -> None:
    """A command that is started without a standard output or error does what it is asked for all the same."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for as long as it runs


def _drop_output() -> None:
    """What the standard output could not take is not tried again when the interpreter ends, which would then say so in
    its own words, with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_the_machine(error: OSError) -> Refusal:
    """A file, or the standard output, that cannot be read or written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f"{error.filename}: " if error.filename is not None else "output: " if is_full else ""
    found = f"{where}{error.strerror or error}"
    if is_full:
        return Refusal(Code.DISK_FULL, found, "room for what is written", "free space there, or choose another place")
    return Refusal(Code.SOURCE_UNREACHABLE, found, "what can be read and written", "choose another path")


def _of_the_encoding(error: UnicodeEncodeError) -> Refusal:
    """Of a word of the command line that is no text, which Python reads as surrogates, or of an output that cannot
    write what is printed."""
    unfit = error.object[error.start : error.end]
    if any("\ud800" <= char <= "\udfff" for char in unfit):
        found = f"{ascii(error.object):.80}, which is no UTF-8"  # noqa: RUF010 - cut after it is escaped
        return Refusal(Code.USAGE, found, "words in UTF-8", "correct the word")
    found = f"an output in {error.encoding}, which has no {unfit[:8]!a}"
    return Refusal(Code.USAGE, found, "one in UTF-8", "set PYTHONIOENCODING=utf-8, or a locale in UTF-8")


def _wants_json(words: Sequence[str]) -> bool:
    """Read from the words themselves, so that a command line that cannot be parsed fails in this form too."""
    asked = [after for word, after in pairwise(words) if word in ("-o", "--output")]
    asked += ["json" for word in words if word in ("-ojson", "--output=json")]
    return (asked or [os.environ.get("SHOAL_OUTPUT", "")])[-1] == "json"


if __name__ == "__main__":
    main()
