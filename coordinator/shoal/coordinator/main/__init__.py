"""`shoal-coordinator`: one program for both roles, region and federation."""

import os

# Read when numpy is imported, which the imports below do. The region predicts on its event loop, from matrices of 256
# rows at most: a second thread saves 1 of 10 ms on idle cores; on two that others keep busy, products wait for the core
# that the other thread does not get, 270 ms (at most 800) instead of 76.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import gc
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.main import federation, region, restore
from shoal.coordinator.main.operators import ask_for_operator, is_served
from shoal.coordinator.main.options import config_of, parser_of, scopes_of, store_options_of, store_settings_of
from shoal.coordinator.main.process import log_of
from shoal.coordinator.main.watchdog import run_with_watchdog
from shoal.coordinator.ports import StoreOptions
from shoal.coordinator.store.etcd.options import EtcdOptions
from shoal.coordinator.store.etcd.users import authorise
from shoal.host import file_descriptors, gc_freeze, logs, service_manager
from shoal.host.private_files import disable_core_dumps
from shoal.host.refusal_text import print_refusal
from shoal.types.codes import Refusal, ShoalError
from shoal.types.identity import check_name

GC_THRESHOLD: Final = 50_000
"""Allocations before Python searches for garbage cycles; its default is 700. One placement step over thousands of nodes
allocates more, all of which dies with the step. Each pass over long-lived objects costs a tenth of a second. What a
quiet region leaves is searched by time, see `gc_freeze.collect_regularly`."""

RUNS: Final = {"region": region.run, "federation": federation.run}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(os.environ).parse_args(arguments)
    try:
        if options.verb == "broker-config":
            os.umask(0o077)
            print(json.dumps({"event": "written", "start": str(region.write_broker(options))}))
            return
        if options.verb == "operator":
            os.umask(0o077)
            folder = Path(options.data_dir) / "operator"
            ask_for_operator(folder)
            event = "written" if asyncio.run(is_served(folder, CoordinatorClock())) else "asked"
            print(json.dumps({"event": event, "operator_dir": str(folder.resolve())}))
            return
        if options.verb == "etcd-users":
            scopes = scopes_of(options)
            etcd = EtcdOptions.parse(StoreOptions(Path(), "", store_settings_of(options, "etcd")))
            changed = asyncio.run(authorise(etcd, scopes))
            print(json.dumps({"event": "authorised", "scopes": scopes, "changed": changed}))
            return
        if options.verb == "restore":
            os.umask(0o077)
            print(json.dumps(restore.restore(_restore_config(options))))
            return
        config = config_of(options)
        os.umask(0o077)
        logs.configure(config.log_level, log_file=log_of(config))
        file_descriptors.raise_limit()
        disable_core_dumps()
        gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
        gc_freeze.freeze()
        refusal = asyncio.run(_run_with_watchdog(RUNS[options.role](config)))
        if refusal is not None:
            raise ShoalError(refusal)
    except ShoalError as error:
        print_refusal(error.refusal)
        raise SystemExit(1) from None


def _restore_config(options: argparse.Namespace) -> restore.RestoreConfig:
    """Raises ShoalError(NAME_INVALID | FIELD_INVALID)."""
    data_dir = Path(options.data_dir)
    return restore.RestoreConfig(
        role=options.role,
        region=check_name(options.region, "region"),
        data_dir=data_dir,
        shared_dir=Path(options.shared_dir or data_dir),
        copy=Path(options.copy),
        store=options.store,
        store_options=store_options_of(options),
        replace=options.replace,
        key_file=Path(options.backup_key_file) if options.backup_key_file else None,
    )


async def _run_with_watchdog(run: Coroutine[Any, Any, None]) -> Refusal | None:
    """Awaits `run`, and ends the process if its event loop hangs. The service manager gets keep-alives from the same
    loop and handles what the process cannot: having been stopped.

    Returns why it was refused. The error itself ends here: its traceback holds servers, and those of gRPC have to go
    while the loop is open, or they print tracebacks of their own.
    """
    beside = [asyncio.create_task(each) for each in (service_manager.keep_alive(), gc_freeze.collect_regularly())]
    try:
        await run_with_watchdog(run)
        return None
    except ShoalError as error:
        return error.refusal
    finally:
        for task in beside:
            task.cancel()
        gc.collect()
