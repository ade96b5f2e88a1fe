"""`python -m fuzz RUNS SEED`: fuzzes each target that a line `TARGET FOLDER` of standard input asks for.

To instrument what is fuzzed takes 12 s, and is done once: each target then runs in a process of its own, forked from
this one. Its end is told by a line of standard output, its status; what it printed lies in FOLDER/log.

The inputs are led by the coverage that they reach. The corpus lies in FOLDER/corpus. What was found lies in FOLDER when
the status is not 0: its input, as libFuzzer names it. One line of JSON in FOLDER/codes.json counts how inputs were
taken.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import atheris  # type: ignore[import-untyped]
from cryptography import x509

with atheris.instrument_imports(include=["shoal", "h11"]):  # pyright: ignore[reportAttributeAccessIssue]
    from fuzz.targets import targets

from harness.crypto.pki import Authority
from shoal.types.device import Role

TIMEOUT_S = 5
"""For one input: more is a wait without bound."""
MEMORY_MIB = 1024
LONGEST = 8192


def fuzz(name: str, runs: int, seed: int, folder: Path) -> None:
    """Ends the process."""
    files = Authority(folder / "ca", "eu", 1e9).issue(Role.AGENT, "n1")
    target = targets(x509.load_pem_x509_certificate(files.certificate.read_bytes()))[name]
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, content in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(content)
    codes: Counter[str] = Counter()

    def one(data: bytes) -> None:
        codes[target.run(data)] += 1
        if codes.total() >= runs:
            signal.setitimer(signal.ITIMER_REAL, 0)  # libFuzzer's for one input: its handler is gone while Python ends
            (folder / "codes.json").write_text(json.dumps(codes))

    arguments = [
        sys.argv[0], str(corpus), f"-atheris_runs={runs}", f"-seed={seed}", f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={LONGEST}", f"-artifact_prefix={folder}/",
    ]  # fmt: skip
    if target.words:
        words = folder / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        arguments.append(f"-dict={words}")
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word)


def main(runs: int, seed: int) -> None:
    for line in sys.stdin:
        name, _, folder = line.strip().partition(" ")
        child = os.fork()
        if child == 0:
            with (Path(folder) / "log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            fuzz(name, runs, seed, Path(folder))
            os._exit(1)  # it does not return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
