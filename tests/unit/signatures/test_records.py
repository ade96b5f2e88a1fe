"""A signed assignment outlives its supervisor: it lies in the record of the worker that holds it."""

from dataclasses import replace

import pytest

from harness.builders.agent_values import assignment
from shoal.agent.packing import pack, unpack
from shoal.types.assignment import Assignment
from shoal.types.codes import ShoalError
from shoal.types.signature import PublisherKey, SignedModel


def test_a_signed_assignment_comes_back_from_its_record() -> None:
    signed = replace(assignment(), signed=SignedModel(b'{"a": "\xff"}', (PublisherKey("shop", "AAAA"),), 2))
    assert unpack(Assignment, pack(signed)) == signed
    assert unpack(Assignment, pack(assignment())) == assignment()


def test_bytes_that_are_no_base64_are_refused() -> None:
    packed = pack(replace(assignment(), signed=SignedModel(b"bundle", ())))
    with pytest.raises(ShoalError):
        unpack(Assignment, packed.replace(b'"YnVuZGxl"', b'"!"'))
