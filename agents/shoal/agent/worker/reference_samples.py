"""Inputs and answers of one model for verification: generated, packed as samples, recorded, compared."""

import hashlib

from google.protobuf.message import DecodeError

from shoal.agent.core.verification import InputComparison
from shoal.agent.worker.answer_writer import AnswerWriter
from shoal.agent.worker.compare import compare
from shoal.agent.worker.engine import Engine, read_and_verify
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.request_reader import RequestNames
from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.tensors import decode, decode_response, make_request
from shoal.artifacts.samples import SamplePack, read_pack, write_pack
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import ShoalError
from shoal.types.migration import Tolerance
from shoal.v1 import witness_pb2
from shoal.wire import nouns


class ReferenceSamples:
    """What a witness asks of a loaded model beside answers. Slow: for a thread, not for the event loop."""

    def __init__(self, order: LoadOrder, engine: Engine) -> None:
        self._order = order
        self._engine = engine
        # (digest, content) of the sample pack in use.
        self._pack: tuple[str, SamplePack] | None = None

    def sample_request(self, seed: int | None, index: int) -> bytes:
        """A serialized request with generated inputs. The same numbers give the same request. `seed` None: the model's
        own seed."""
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(self._order.digest.encode()).digest()[:8], "big")
        feeds = sample_input(self._engine.inputs, self._order.work, seed, index)
        return make_request(feeds).SerializeToString()

    def pack_sample(self, path: str, digest: str, index: int) -> bytes:
        """Sample number `index` of the pack at `path`, serialized. Empty if the pack has no such sample."""
        if self._pack is None or self._pack[0] != digest:
            self._pack = digest, read_pack(read_and_verify(path, digest), self._engine.inputs, self._engine.outputs)
        try:
            feeds, answers = self._pack[1].sample(index)
        except IndexError:
            self._pack = None
            return b""
        request = make_request(feeds)
        response = b"".join(AnswerWriter().write(RequestNames(b"", b"", b""), answers)) if answers else b""
        return witness_pb2.Sample(request=request.SerializeToString(), response=response).SerializeToString()

    def record(self, recorded: witness_pb2.Recorded) -> bytes:
        """A sample pack of these inputs and answers. Raises ShoalError(MODEL_INVALID)."""
        inputs, outputs = self._engine.inputs, self._engine.outputs
        samples = [
            (
                decode(oip.ModelInferRequest.FromString(each.request), inputs),
                decode_response(oip.ModelInferResponse.FromString(each.response), outputs),
            )
            for each in recorded.samples
        ]
        return write_pack(samples, inputs, outputs)

    def compare(self, answers: witness_pb2.Answers) -> InputComparison:
        """Compare two answers. One that this model cannot have given counts as different."""
        try:
            expected, got = (
                decode_response(oip.ModelInferResponse.FromString(answer), self._engine.outputs)
                for answer in (answers.expected, answers.got)
            )
        except (ShoalError, DecodeError) as error:
            found = error.refusal.found if isinstance(error, ShoalError) else "bytes that are no answer"
            return InputComparison((), f"answers that cannot be compared: {found}", 0)
        return compare(expected, got, [nouns.from_wire(Tolerance, each) for each in answers.tolerances])
