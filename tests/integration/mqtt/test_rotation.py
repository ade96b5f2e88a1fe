"""The broker follows a rotation of the region's CA: no connection and no request is lost, everybody is let in again."""

from cryptography import x509
from integration.mqtt.region import NAME, NODES

from harness.cluster.stack import DevStack, InferenceLoad
from harness.wait import wait_until

WAIT_TIMEOUT_S = 40.0


def roots(stack: DevStack) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates((stack.control.folder / "broker" / "ca.pem").read_bytes())


def is_issued_by(stack: DevStack, root: x509.Certificate) -> bool:
    """Whether the broker's certificate is of this CA."""
    found = x509.load_pem_x509_certificate((stack.control.folder / "broker" / "cert.pem").read_bytes())
    try:
        found.verify_directly_issued_by(root)
    except Exception:
        return False
    return True


def laggards(stack: DevStack) -> set[str]:
    """Nodes that the rotation waits for, by name."""
    with stack.api() as api:
        found = {each.uri.rpartition("/")[2] for each in api.authority().laggards}
    return found & set(NODES)


def test_the_broker_trusts_the_next_ca_before_it_issues_and_shows_its_certificate_when_it_does(stack: DevStack) -> None:
    (old,) = roots(stack)
    process, workers = stack.processes("broker"), stack.workers()
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME, clients=2, rate=10.0) as load:
        with stack.api() as api:
            api.rotate()
        wait_until(lambda: len(roots(stack)) == 2, WAIT_TIMEOUT_S, "the broker trusts both")
        (new,) = (root for root in roots(stack) if root != old)
        wait_until(lambda: is_issued_by(stack, new), WAIT_TIMEOUT_S, "a certificate of the next CA")
        wait_until(lambda: not laggards(stack), WAIT_TIMEOUT_S, "every node to come by a certificate of the next CA")
        load.wait_for(20)
    assert stack.processes("broker") == process, "it was never restarted"
    assert load.verdict().lost_count == 0
    assert stack.workers() == workers
    with stack.api() as api:
        epochs = {view.node.name: view.epoch for view in api.get("nodes").nodes}
    stack.kill("broker")
    stack.control.break_member("broker", "resume")

    def are_back() -> bool:
        with stack.api() as api:
            return all(view.epoch > epochs[view.node.name] for view in api.get("nodes").nodes)

    wait_until(are_back, WAIT_TIMEOUT_S, "both sides show and trust the new certificates")
