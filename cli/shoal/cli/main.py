"""`shoal`: one command for people. A file per verb in `commands/`; this one only joins them."""

import sys

import click

from shoal.cli.commands import (
    apply,
    backup,
    bench,
    ca,
    can_move,
    context,
    cordon,
    delete,
    demo,
    describe,
    dev,
    doctor,
    events,
    explain,
    federation,
    get,
    infer,
    logs,
    migrate,
    model,
    node,
    plan,
    policy,
    region,
    rollback,
    support,
    token,
    trace,
    upgrade,
    validate,
)
from shoal.types.codes import Code, Refusal, ShoalError, refuse

_VERBS: tuple[click.Command, ...] = (
    demo.demo,
    dev.dev,
    context.context,
    policy.policy,
    validate.validate,
    plan.plan,
    apply.apply,
    get.get,
    describe.describe,
    explain.explain,
    can_move.can_move,
    delete.delete,
    infer.infer,
    model.model,
    events.events,
    cordon.cordon,
    cordon.uncordon,
    migrate.migrate,
    migrate.drain,
    rollback.rollback,
    rollback.history,
    node.node,
    ca.ca,
    region.region,
    federation.federation,
    token.token,
    doctor.doctor,
    backup.backup,
    backup.restore,
    logs.logs,
    trace.trace,
    support.support_bundle,
    upgrade.upgrade,
    bench.bench,
)


LATER: dict[str, str] = {
    "simulate": "simulator",
    "top": "dashboard",
    "dashboard": "dashboard",
}
"""Verbs of the contract that a later release brings, and with what."""


class Verbs(click.Group):
    """Says of a verb that is still to come that it is, rather than that there is none."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in LATER:
            raise refuse(
                Code.NOT_SUPPORTED_YET, f"shoal {args[0]}", "a verb of this release", f"it comes with: {LATER[args[0]]}"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SHOAL"})
@click.version_option(package_name="shoal", message="shoal %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def shoal(ctx: click.Context, debug: bool) -> None:
    """Place ONNX models on whatever can run them, and see why they are where they are."""
    ctx.meta["shoal.debug"] = debug


for _verb in _VERBS:
    shoal.add_command(_verb)


def main() -> None:
    """Every error is one line, `CODE  found  asked  remedy`, on stderr; status 255, 2 for a wrong command line."""
    debug = "--debug" in sys.argv
    try:
        sys.exit(shoal(standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "shoal"
        fail(Refusal(Code.FIELD_INVALID, error.format_message(), "", f"{where} --help"), error.exit_code)
    except ShoalError as error:
        if debug:
            raise
        fail(error.refusal)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our pipe has seen enough.
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if debug:
            raise
        fail(Refusal(Code.INTERNAL, f"{type(error).__name__}: {error}", "", "run again with --debug and report it"))


def fail(refusal: Refusal, status: int = 255) -> None:
    print(refusal, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
