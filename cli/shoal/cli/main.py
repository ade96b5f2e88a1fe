"""`shoal`: one command for people. A file per verb in `commands/`; this one only joins them."""

import sys

import click

from shoal.cli.commands import (
    apply,
    bench,
    context,
    cordon,
    delete,
    demo,
    describe,
    dev,
    doctor,
    events,
    explain,
    get,
    infer,
    model,
    plan,
    policy,
    token,
    validate,
)
from shoal.types.codes import Code, Refusal, ShoalError

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
    delete.delete,
    infer.infer,
    model.model,
    events.events,
    cordon.cordon,
    cordon.uncordon,
    token.token,
    doctor.doctor,
    bench.bench,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SHOAL"})
@click.version_option(package_name="shoal", message="shoal %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def shoal(ctx: click.Context, debug: bool) -> None:
    """Place ONNX models on whatever can run them, and see why they are where they are."""
    ctx.meta["shoal.debug"] = debug


for _verb in _VERBS:
    shoal.add_command(_verb)


def main() -> None:
    """Every error is one line, `CODE  found  asked  remedy`, on stderr; status 255, or what the verb says."""
    debug = "--debug" in sys.argv
    try:
        sys.exit(shoal(standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            error.show()
            sys.exit(2)
        fail(Refusal(Code.FIELD_INVALID, error.format_message()))
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


def fail(refusal: Refusal) -> None:
    print(refusal, file=sys.stderr)
    sys.exit(255)


if __name__ == "__main__":
    main()
