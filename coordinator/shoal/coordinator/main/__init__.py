"""`shoal-coordinator`: one program in the roles of a region and of a federation."""

import argparse
import asyncio
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shoal.coordinator.main import federation, region, restore
from shoal.coordinator.main.options import config_of, parser_of, store_options_of
from shoal.coordinator.main.process import log_of
from shoal.types.codes import ShoalError
from shoal.wire import descriptors, garbage, logs
from shoal.wire.identity import check_name
from shoal.wire.private import no_dumps

YOUNG: Final = 50_000
"""Objects made before Python looks for cycles among them, 700 by its own choice: a look at thousands of nodes makes
more, all of which die with it, and each pass over what lives as long as a session costs a tenth of a second."""

RUNS: Final = {"region": region.run, "federation": federation.run}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(os.environ).parse_args(arguments)
    try:
        if options.verb == "broker-config":
            os.umask(0o077)
            print(json.dumps({"event": "written", "start": str(region.write_broker(options))}))
            return
        if options.verb == "restore":
            os.umask(0o077)
            print(json.dumps(restore.restore(_restore_config(options))))
            return
        config = config_of(options)
        os.umask(0o077)
        logs.configure(config.log_level, keep=log_of(config))
        descriptors.raise_limit()
        no_dumps()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        garbage.set_apart()
        asyncio.run(RUNS[options.role](config))
    except ShoalError as error:
        print(error.refusal, file=sys.stderr)
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
