"""Every place that names an emulated device says so, in tables and in data."""

import math
from typing import Any

import pytest

from shoal.cli.commands.migrate import follow
from shoal.cli.render import listings, migrations, plan, resources
from shoal.cli.render.data import as_data
from shoal.cli.render.move import show_prospect
from shoal.v1 import federation_pb2, nouns_pb2, operator_pb2

KEY = nouns_pb2.WorkloadKey(tenant="default", name="reader")
EMULATED = operator_pb2.MigrationPlace(assignment="a-1", node="edge", device="npu0", stand_in="emulated")
REAL = operator_pb2.MigrationPlace(assignment="a-2", node="big", device="cpu0")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


def migration(**more: Any) -> operator_pb2.MigrationView:
    stages = [operator_pb2.MigrationStage(stage="planned", at=1.0)]
    view = operator_pb2.MigrationView(id="m-1", workload=KEY, stage="planned", cause="operator", stages=stages)
    view.MergeFrom(operator_pb2.MigrationView(**more))
    return view


def test_migrations_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    moves = [
        migration(source=REAL, target=EMULATED),
        migration(source=EMULATED, to="edge/npu0", to_stand_in="emulated"),
    ]
    listings.show("migrations", moves, wide=False)
    _, first, second = capsys.readouterr().out.splitlines()
    assert "big/cpu0 " in first
    assert "edge/npu0 (emulated)" in first
    assert second.count("edge/npu0 (emulated)") == 2
    assert "big/cpu0 (emulated)" not in first


def test_migrations_as_data() -> None:
    data = as_data(migration(source=REAL, target=EMULATED))
    assert (data["source"]["stand_in"], data["target"]["stand_in"]) == ("", "emulated")


def test_a_watched_migration(capsys: pytest.CaptureFixture[str]) -> None:
    view = migration(source=REAL, to="edge/npu0", to_stand_in="emulated")
    assert "edge/npu0 (emulated)" in migrations.stage_line(view)
    migrations.show_migration(view)
    assert "big/cpu0 -> edge/npu0 (emulated)" in capsys.readouterr().out


def test_a_watched_migration_says_each_place_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = migration(source=REAL, target=EMULATED, stages=[operator_pb2.MigrationStage(stage="done", at=2.0)])
    done.stage = "done"
    said = list[str]()
    follow(None, [done], said.append)  # type: ignore[arg-type]  # one that is over asks for nothing
    assert said == ["m-1  planned", "m-1  done"]


def test_changes_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        operator_pb2.PlacementChange(sign="+", node="edge", device="npu0", precision="fp32", stand_in="emulated"),
        operator_pb2.PlacementChange(sign="-", node="big", device="cpu0", precision="fp32"),
    ]
    plan.show_workload(operator_pb2.WorkloadPlan(workload=KEY, wanted=1, placed=1, changes=changes), wide=False)
    lines = capsys.readouterr().out.splitlines()
    assert "  + edge/npu0 (emulated) fp32  " in lines
    assert "  - big/cpu0 fp32  " in lines


def test_a_move_that_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    held = operator_pb2.MoveHoldView(
        source=EMULATED, to="edge/npu1", to_stand_in="emulated", cause="energy", why="less", hold="gain", found="1 %"
    )
    plan.show_explanation(operator_pb2.ExplainReply(move_holds=[held]), wide=False)
    said = capsys.readouterr().out
    assert "no move of a-1 from edge/npu0 (emulated) to edge/npu1 (emulated) (energy: less)" in said


def test_bids_and_agreements(capsys: pytest.CaptureFixture[str]) -> None:
    offer = federation_pb2.Offer(id="b-1", precision="fp32", stand_in="emulated")
    plan.show_bids([operator_pb2.BidView(region="cloud", offer=offer)], wide=False)
    assert "cloud (emulated)" in capsys.readouterr().out
    view = operator_pb2.AgreementView(agreement="g-1", side="origin", counterpart="cloud", workload=KEY, offer=offer)
    listings.show("agreements", [view], wide=False)
    assert "cloud (emulated)" in capsys.readouterr().out


def test_events() -> None:
    event = operator_pb2.Event(
        at=1.0, code="NODE_READY", subject="edge", node="edge", message="up", stand_in="emulated"
    )
    assert "NODE_READY  edge (emulated)  up" in resources.event_line(event)
    event.workload.CopyFrom(KEY)
    assert "default/reader [edge (emulated)]  up" in resources.event_line(event)
    event.stand_in = ""
    assert "emulated" not in resources.event_line(event)


def test_devices_fit_a_terminal_and_say_what_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rates = nouns_pb2.Rates(matmul_flops={"fp32": 1.113e11})

    def row(device: nouns_pb2.Device, **more: Any) -> operator_pb2.DeviceView:
        reading = nouns_pb2.Reading(device=device.name, free_bytes=21 * 2**30)
        receipt = nouns_pb2.Receipt(node="dc", rates=rates)
        return operator_pb2.DeviceView(node="edge-npu", device=device, receipt=receipt, liveness="ready",
                                       reading=None if more else reading, **more)  # fmt: skip

    silent = nouns_pb2.Refusal(code="DEVICE_UNREACHABLE", found="its driver faulty does not answer for 12 s: it hangs")
    rows = [
        row(nouns_pb2.Device(name="cpu0", kind="cpu")),
        row(nouns_pb2.Device(name="qualcomm-ai100-dm2", kind="npu", emulated=True)),
        row(nouns_pb2.Device(name="htp-sim", kind="npu", emulated=True, simulated=True)),
        row(nouns_pb2.Device(name="gpu0", kind="gpu"), reason=silent, since=1.75e9),
    ]
    listings.show("devices", rows, wide=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines[1:]]
    assert [each[1] for each in words] == ["real", "emulated", "simulated", "real"]
    assert lines[-1].endswith("silent 15:06Z")
    listings.show("devices", rows[-1:], wide=True)
    assert "DEVICE_UNREACHABLE its driver faulty does not answer" in capsys.readouterr().out


def test_a_receipt_names_the_whole_system_that_its_watts_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    rates = nouns_pb2.Rates(active_w=632.0, energy_source="profile")
    receipt = nouns_pb2.Receipt(node="dc", device="gpu0", rates=rates, emulated=True, system="Dell XR5610 (1x L4)")
    row = operator_pb2.DeviceView(node="dc", device=nouns_pb2.Device(name="gpu0", emulated=True), receipt=receipt)
    listings.show("devices", [row], wide=True)
    assert "632W (profile, of the whole Dell XR5610 (1x L4))" in capsys.readouterr().out


def test_a_device_says_whose_memory_it_works_in_and_which_profile_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    device = nouns_pb2.Device(name="hailo-8", memory_bytes=2**30, memory_in="cpu0", emulated=True)
    receipt = nouns_pb2.Receipt(
        node="dc", device="hailo-8", source="hailo-8: paced by 119 models of a file", emulated=True
    )
    listings.show("devices", [operator_pb2.DeviceView(node="dc", device=device, receipt=receipt)], wide=True)
    shown = capsys.readouterr().out
    assert "1GiB of cpu0" in shown
    assert "PCIe" not in shown
    assert "119 models" not in shown


def test_a_device_says_where_it_is_in_its_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    links = [
        nouns_pb2.DeviceLink(name="PCIe 4.0 x16", bytes_per_s=31.5077e9, source="NVML"),
        nouns_pb2.DeviceLink(name="NVLink x4", source="NVML", to="gpu1"),
    ]
    rows = [
        operator_pb2.DeviceView(node="dc", device=nouns_pb2.Device(name="gpu0", numa=0, links=links)),
        operator_pb2.DeviceView(
            node="dc",
            device=nouns_pb2.Device(name="gpu0-mig1", power_in="gpu0-mig0"),
            reading=nouns_pb2.Reading(device="gpu0-mig1", power_w=95.0),
        ),
    ]
    listings.show("devices", rows, wide=True)
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "PCIe 4.0 x16 (31.5GB/s, NVML); gpu1: NVLink x4 (NVML)" in first
    assert "95W with gpu0-mig0" in second


@pytest.mark.parametrize(
    ("load_s", "shown"),
    [
        ((0.1, 0.2, 0.4), "load 200ms [100ms..400ms], of it at least 30ms over PCIe 4.0 x16 (31.5GB/s, NVML)"),
        ((math.nan,) * 3, "load time unknown, of it at least 30ms over PCIe 4.0 x16 (31.5GB/s, NVML)"),
    ],
)
def test_can_move_says_what_the_link_takes(
    capsys: pytest.CaptureFixture[str], load_s: tuple[float, float, float], shown: str
) -> None:
    low, mid, high = load_s
    one = operator_pb2.MoveEstimate(
        node="dc", device="gpu0", answer="yes", transfer_s=0.03,
        load_s=operator_pb2.Estimate(low=low, mid=mid, high=high),
        link=nouns_pb2.DeviceLink(name="PCIe 4.0 x16", bytes_per_s=31.5e9, source="NVML"),
    )  # fmt: skip
    show_prospect(operator_pb2.CanMoveReply(answer="yes", estimates=[one]), "dc", wide=False)
    assert shown in capsys.readouterr().out
    one.ClearField("link")
    show_prospect(operator_pb2.CanMoveReply(answer="yes", estimates=[one]), "dc", wide=False)
    assert "over" not in capsys.readouterr().out, "nothing is known, or an older coordinator does not say"
