"""What the entries of a region's event log mean (`shoal events`), for the reference.

An entry is named by one of these, or by a code of `types.codes` when it tells of a refusal or a wait. A test ensures
that the coordinator writes no other name.
"""

from collections.abc import Mapping
from typing import Final

_REPLICAS: Final = {
    "ASSIGNED": "A replica was assigned to a device.",
    "READY": "A replica serves.",
    "STANDS_BY": "A standby is ready to take over.",
    "TOOK_OVER": "A standby took the place of a replica.",
    "DRAINING": "A replica finishes its requests and takes no new ones.",
    "REMOVED": "A replica is gone from its node.",
    "SCALED_UP": "A replica that was scaled to zero is loaded again, for a request.",
    "DEVICE_SLEEPS": "An idle device was put to sleep.",
    "DEVICE_WAKES": "A device was woken.",
}

_MIGRATIONS: Final = {
    "MIGRATION_QUEUED": "A move that an operator asked for waits until what refuses it is gone.",
    "MIGRATION_PLANNED": "A move waits for a place that can hold the new replica beside the old one.",
    "MIGRATION_RESERVED": "The new replica is assigned, and its node has not reported it yet.",
    "MIGRATION_STAGING": "The node fetches and loads the model.",
    "MIGRATION_WARMING": "The new replica runs its first inferences.",
    "MIGRATION_VERIFYING": "Answers of both replicas are compared.",
    "MIGRATION_CLEARING": "The old replica leaves first, since its device cannot hold both: nothing serves meanwhile.",
    "MIGRATION_SHIFTING": "Requests go to the new replica, step by step under the guard.",
    "MIGRATION_DRAINING": "The old replica finishes its requests.",
    "MIGRATION_DONE": "The move is complete.",
    "MIGRATION_ROLLING_BACK": "All requests are back at the old replica; the new one goes.",
    "MIGRATION_RETURNING": "The old replica, which had left, is loaded again.",
    "MIGRATION_ABORTED": "The move ended without effect.",
    "MIGRATION_DIFFERS": "Answers differ beyond the tolerance, and the policy lets the move go on.",
    "MIGRATION_UNVERIFIED": "The new replica serves without a comparison: nobody was left to compare with.",
    "MIGRATION_BROUGHT": "What the move gained, measured some time after it, beside what was expected.",
}

_NODES: Final = {
    "NODE_CONNECTED": "A node's agent opened a session.",
    "NODE_DISCONNECTED": "A node's session ended.",
    "NODE_NEVER_SEEN": "A node is known from the store, and silent since this coordinator started.",
    "NODE_READY": "A node reports again.",
    "NODE_SUSPECT": "A node missed heartbeats.",
    "NODE_LOST": "A node was silent for too long; its replicas are replaced.",
    "NODE_CORDONED": "An operator cordoned the node.",
    "NODE_UNCORDONED": "An operator lets the node take work again.",
    "NODE_LABELLED": "An operator changed labels of the node.",
    "NODE_TRUSTED": "A node's reports are sound again, so that its quarantine ended.",
    "NODE_RELEASED": "An operator ended a quarantine.",
    "NODE_SETTLED": "An operator decided which of two agents with one identity stays.",
    "NODE_REVOKED": "An operator revoked the node's certificates.",
    "NODE_DELETED": "A node's record was deleted.",
    "RECEIPT_KEPT": "A new measurement of a device was accepted.",
    "BROKER_LOST": "The coordinator lost the MQTT broker; nodes that come by it are not judged meanwhile.",
    "BROKER_LEFT": "The coordinator gave up its connection to the MQTT broker, as for another certificate.",
    "BROKER_BACK": "The broker answers again.",
}

_DOCUMENTS: Final = {
    "APPLIED": "A document was applied; the message names its revision.",
    "DELETED": "A document was deleted.",
    "MODEL_KEPT": "A model was pushed and accepted.",
    "MODEL_REMOVED": "A model was removed.",
    "MEASUREMENTS_IMPORTED": "An operator imported what another region's warm-ups measured.",
    "MEASUREMENTS_REMOVED": "An operator had the region forget what another region's warm-ups measured.",
    "MODEL_CLEARED": "An operator cleared what was held against a model.",
    "ROLLBACK_ALLOWED": "An operator allowed an older version of a signed model.",
    "SAMPLES_KEPT": "Samples of a model were pushed and accepted.",
    "SAMPLES_REMOVED": "Samples were removed.",
    "REFERENCE_RECORDED": "A first replica's answers were recorded as reference.",
    "BUDGET_EXCEEDED": "A tenant's replicas cost more than its quota.",
    "BUDGET_MET": "A tenant is within its quota again.",
    "DECISION_REFUTED": "What was kept of a workload or of a node is not what it is from scratch: a defect.",
}

_IDENTITY: Final = {
    "TOKEN_CREATED": "A token was made.",
    "TOKEN_DELETED": "A token was deleted.",
    "ENROLLED": "An identity was enrolled with a token.",
    "RENEWED": "A certificate was renewed; or, of a workload, its agreement was, and its service there changed.",
    "REVOKED": "An identity's certificates were revoked.",
    "CA_FOLLOWED": "A rotation of the CA began: nodes, or a federation's regions, learn to trust the next one.",
    "CA_ISSUES": "The new CA issues certificates.",
    "CA_RETIRED": "The old CA is no longer trusted.",
}

_REGION: Final = {
    "LEADER_ELECTED": "A coordinator leads from now on.",
    "HISTORY_OPENED": "The region's state began a new history, at its first start or after a restore.",
    "STORE_BACK": "The store takes writes again.",
    "SIGNAL_SET": "An operator set price or carbon by hand.",
    "SIGNAL_CLEARED": "An operator's value of price or carbon was cleared.",
    "SIGNAL_CHANGED": "Price or carbon moved by a notable share.",
    "SIGNAL_BACK": "A feed of price or carbon gives values again.",
}

_FEDERATION: Final = {
    "FEDERATION_CA_CHANGED": "The region trusts other CAs of its federation, which rotates its own.",
    "FEDERATION_JOINED": "The region joined a federation.",
    "FEDERATION_LEFT": "The region left its federation.",
    "REGION_JOINED": "A region joined this federation.",
    "REGION_CHANGED": "A region's address changed.",
    "REGION_LEFT": "A region left this federation.",
    "LEDGER_RESTARTED": "A region's ledger is copied anew, since its store has another history; the old copies stay.",
    "SOLICITED": "Other regions were asked who would run a workload.",
    "BID": "A region made an offer.",
    "COUNTERED": "A region made an offer that meets the policy only with a change.",
    "DECLINED": "A region made no offer; the message has its code.",
    "AWARDED": "An offer was accepted.",
    "GRANTED": "The other region confirmed the agreement.",
    "NOTICED": "A side gave notice of a workload's agreement.",
    "RELEASED": "An offer that was not needed was given back.",
    "EXPIRED": "An offer or an agreement came to its end without an answer.",
    "ENDED": "A workload's agreement ended.",
    "AGREEMENT_OFFERED": "The region made a bid and keeps capacity for it.",
    "AGREEMENT_GRANTED": "A bid was awarded: an agreement is in force.",
    "AGREEMENT_RENEWED": "An agreement began another term.",
    "AGREEMENT_NOTICED": "A side gave notice; the agreement ends once the workload runs elsewhere.",
    "AGREEMENT_RELEASED": "Capacity kept for a bid was given back.",
    "AGREEMENT_EXPIRED": "Capacity kept for a bid was not awarded in time.",
    "AGREEMENT_BREACHED": "The origin stopped renewing: the agreement ended as broken.",
    "AGREEMENT_ENDED": "An agreement ended.",
}

EVENT_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Replicas": _REPLICAS,
    "Moves": _MIGRATIONS,
    "Nodes": _NODES,
    "Documents and models": _DOCUMENTS,
    "Identities": _IDENTITY,
    "Region": _REGION,
    "Federation": _FEDERATION,
}
"""By what they are about."""

EVENT_HELP: Final[Mapping[str, str]] = {name: text for group in EVENT_GROUPS.values() for name, text in group.items()}
