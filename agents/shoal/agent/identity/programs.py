"""Asks the program of the identity (`program.py`), from a thread or before the event loop: it blocks until its end."""

from typing import Final

from shoal.agent.identity.orders import Answer, JoinOrder, Order, RenewOrder
from shoal.agent.programs import run_program
from shoal.types.codes import ShoalError

PROGRAM: Final = "shoal.agent.identity.program"
LIMIT_S: Final = 20.0
"""The longest that an order may take that asks nobody else. It takes 0.2 s on two cores of a server."""
ENROLMENT_LIMIT_S: Final = 300.0
"""The longest for enrolment: an attempt at each of some coordinators, each of several calls of up to 15 s."""


def run_order(order: Order) -> Answer:
    """The program's answer. Raises ShoalError: what it refused, and INTERNAL where it did not end with an answer."""
    limit_s = ENROLMENT_LIMIT_S if isinstance(order, JoinOrder | RenewOrder) else LIMIT_S
    answer = run_program(PROGRAM, order, Answer, type(order).__name__, limit_s=limit_s)
    if answer.refusal is not None:
        raise ShoalError(answer.refusal)
    return answer
