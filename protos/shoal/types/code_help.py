"""What each code means, and what to do about it: for the reference, and for people who meet a code without a refusal.

A refusal carries what was found and wanted in that case; this says what holds in every case. A test ensures that every
code has exactly one entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.codes import Code


@dataclass(frozen=True, slots=True)
class CodeHelp:
    """In sentences, without a line break."""

    # When the code is given.
    cause: str
    # What an operator or a client can do.
    cure: str


_DOCUMENTS: Final = {
    Code.YAML_INVALID: CodeHelp(
        "The file is not YAML 1.2 in UTF-8.", "Correct the line that is named; save the file as UTF-8."
    ),
    Code.YAML_TOO_LARGE: CodeHelp(
        "A file has more bytes, values or documents than the limit.", "Split it into several files."
    ),
    Code.YAML_TOO_DEEP: CodeHelp("Mappings and lists are nested deeper than the limit.", "Flatten the document."),
    Code.YAML_ALIAS_LIMIT: CodeHelp(
        "The file has too many aliases, or an alias inside the value that it names.",
        "Write the value out in place of the alias.",
    ),
    Code.YAML_TAG_DENIED: CodeHelp(
        "A value has a YAML tag, such as `!!python/object`.",
        "Remove the tag; quote a value that must stay text.",
    ),
    Code.YAML_DUPLICATE_KEY: CodeHelp("A mapping has the same key twice.", "Remove one of the two."),
    Code.KIND_UNKNOWN: CodeHelp(
        "`kind` is no kind that this version knows, or one that a federation does not have.",
        "Write one of Workload, Policy, Tenant or Region; ask the region instead of the federation.",
    ),
    Code.API_VERSION_UNKNOWN: CodeHelp("`apiVersion` is not `shoal/v1`.", "Write `apiVersion: shoal/v1`."),
    Code.FIELD_UNKNOWN: CodeHelp(
        "The document has a field that its kind does not have.",
        "Use the name that is proposed; `shoal policy new KIND` prints a template.",
    ),
    Code.FIELD_MISSING: CodeHelp("A field or an option that is needed is not given.", "Add it."),
    Code.FIELD_INVALID: CodeHelp(
        "A value has the wrong form, or is not one of those that the field takes.",
        "Give it as the refusal says; the policy reference has an example for each field.",
    ),
    Code.FIELD_WITHOUT_EFFECT: CodeHelp(
        "The field would change nothing beside the others in this document.",
        "Remove it, or change the field that the refusal names.",
    ),
    Code.NOT_SUPPORTED_YET: CodeHelp(
        "This release has no code that acts on the field, verb or protocol version.",
        "Remove it, or upgrade the older of two programs that do not agree.",
    ),
    Code.NAME_INVALID: CodeHelp(
        "A name has other characters than lower-case letters, digits and inner hyphens, is too long, or is reserved.",
        "Choose another name.",
    ),
    Code.NAME_DUPLICATE: CodeHelp(
        "Two documents of one kind, two keys of a Region, or two devices of a node have the same name.",
        "Rename or remove one.",
    ),
    Code.UNIT_MISSING: CodeHelp("A quantity has no unit.", "Add one: `20ms`, `4GiB`, `1.50 USD/h`."),
    Code.UNIT_WRONG: CodeHelp(
        "The unit does not belong to this kind of quantity.", "Use one of the units that are listed."
    ),
    Code.QUANTITY_INVALID: CodeHelp(
        "The value is no number with a unit, or is out of bounds.", "Write it as the refusal says."
    ),
    Code.EXPRESSION_INVALID: CodeHelp(
        "A CEL expression does not compile, or its result is not true or false.",
        "Correct it at the column that is named; guard optional labels with `has(..)`.",
    ),
    Code.POLICY_COST: CodeHelp(
        "A CEL expression could take too long: nested macros, a long pattern, or very long lists.",
        "Simplify the expression.",
    ),
    Code.POLICY_UNREACHABLE: CodeHelp(
        "The document asks for something that can never hold, whatever devices there are.",
        "Change one of the two fields that contradict each other.",
    ),
    Code.POLICY_UNKNOWN: CodeHelp(
        "A workload names a policy that the region does not have.", "Apply the policy with the workload or before it."
    ),
    Code.TENANT_UNKNOWN: CodeHelp(
        "The workload names a tenant that the region does not have.", "Apply a Tenant of that name, or correct it."
    ),
    Code.CONSENT_MISSING: CodeHelp(
        "The policy verifies moves with captured requests, and the workload does not consent to capture.",
        "Set `capture: {consent: true}`, or verify with samples.",
    ),
}

_COMMAND_LINE: Final = {
    Code.USAGE: CodeHelp(
        "A command line has an unknown verb or option, or a value that it does not take.",
        "See the command's `--help`.",
    ),
}

_PLACEMENT: Final = {
    Code.MEMORY_SHORT: CodeHelp(
        "The device has less free memory than the model is predicted to need.",
        "Free memory, choose a smaller variant, or allow another device.",
    ),
    Code.UTILISATION_SHORT: CodeHelp(
        "The declared traffic, with what the device already serves, exceeds what it can answer.",
        "Add replicas or devices, or lower the declared `rate`.",
    ),
    Code.OP_UNSUPPORTED: CodeHelp(
        "The device's execution provider leaves more of the graph to the CPU than `require.partial` allows, or no "
        "kernel exists for an operator.",
        "Use a variant without these operators, fix the shapes, or allow a share with `require.partial`.",
    ),
    Code.IR_UNSUPPORTED: CodeHelp(
        "The model's IR version is newer than the device's ONNX Runtime reads.",
        "Export the model with an older IR version, or upgrade the runtime.",
    ),
    Code.OPSET_UNSUPPORTED: CodeHelp(
        "The model's opset is newer than the device's ONNX Runtime has.",
        "Export the model with an older opset, or upgrade the runtime.",
    ),
    Code.SHAPES_OPEN: CodeHelp(
        "The device takes only models whose shapes are all fixed, and an axis of this one is open.",
        "State the shapes that are served in `spec.model.shapes`.",
    ),
    Code.PREPARE_UNAVAILABLE: CodeHelp(
        "A model is to be prepared in another precision, and its samples or the node's packages for that are "
        "missing, or it would gain nothing.",
        "Push samples, and install the agent's extra `prepare` on the node.",
    ),
    Code.PRECISION_DENIED: CodeHelp(
        "The variant's precision, or the only one that the device computes in, is not in `require.precision.allow`.",
        "Add the precision to `allow`, or a variant in one that is allowed.",
    ),
    Code.SLO_UNREACHABLE: CodeHelp(
        "The predicted 95th percentile of latency is above `require.latency.p95` on this device.",
        "Raise the bound, or allow a faster device or a smaller precision.",
    ),
    Code.SELECTOR_MISMATCH: CodeHelp(
        "`require.where` is false for this candidate, or reads a label that it does not have.",
        "Label the node, or widen the expression.",
    ),
    Code.RESIDENCY: CodeHelp(
        "The region lies outside `require.residency`.",
        "Place it in an allowed region; residency is never relaxed by itself.",
    ),
    Code.COST_OVER: CodeHelp(
        "The predicted cost per hour of all replicas is above `limits.cost`.",
        "Raise the limit, or allow cheaper devices; a node without a price costs an unknown amount and is out.",
    ),
    Code.ENERGY_OVER: CodeHelp(
        "The predicted energy per inference is above `limits.energy`.",
        "Raise the limit, or allow a smaller precision or another device.",
    ),
    Code.CARBON_OVER: CodeHelp(
        "The predicted emissions per hour are above `limits.carbon`, or the region's intensity is unknown.",
        "Raise the limit, set `spec.carbon` of the Region, or allow delegation to a cleaner region.",
    ),
    Code.POWER_OVER: CodeHelp(
        "The devices of the node together would draw more than `limits.node_power`.",
        "Raise the limit, or free the node.",
    ),
    Code.CAPABILITY_STALE: CodeHelp(
        "The device's receipt is older than `require.trust.within`, or was measured with another runtime version.",
        "Have it measured again (`shoal node measure NODE`), or lengthen `within`.",
    ),
    Code.CAPABILITY_UNMEASURED: CodeHelp(
        "The device has no measured figures for this model's precision, only declared ones or none.",
        "Wait for its measurement; `shoal get devices -o wide` shows the source of each figure.",
    ),
    Code.SPREAD_CONFLICT: CodeHelp(
        "The device, the node or the label's value has a replica of this workload already, and `spread` allows one.",
        "Add nodes, or weaken `spread`.",
    ),
    Code.LABEL_MISSING: CodeHelp(
        "A rule of the policy (`spread` or `per`) goes by a node label that this node does not have.",
        "`shoal node label NODE LABEL=VALUE`, or name another label; `shoal get nodes -o wide` shows those there are.",
    ),
    Code.NODE_CORDONED: CodeHelp("An operator cordoned the node: it takes no new work.", "`shoal uncordon NODE`."),
    Code.NODE_SUSPECT: CodeHelp(
        "The node missed heartbeats, and is not given up yet.", "Wait, or look at its agent and network."
    ),
    Code.NODE_LOST: CodeHelp(
        "The node was silent for longer than `partition.lost_after`, or is not connected.",
        "On the device: `systemctl status shoal-agent`, `journalctl -u shoal-agent`; then its network.",
    ),
    Code.NODE_QUARANTINED: CodeHelp(
        "The node's reports cannot be true or were not signed properly, so that nothing new is placed there.",
        "See the reason in `shoal describe node NODE`; `shoal node release NODE` ends it.",
    ),
    Code.NODE_NOT_READY: CodeHelp(
        "The node is not connected, its front does not answer, or no gateway is ready.",
        "Start the node; its agent restarts a front that hangs.",
    ),
    Code.DEVICE_LOST: CodeHelp(
        "The device is no longer reported by its node.", "Look at the device and its driver; replicas go elsewhere."
    ),
    Code.DEVICE_UNREACHABLE: CodeHelp(
        "The device's driver does not answer, so that it cannot be measured now.",
        "See the agent's log and what the driver wrote to standard error.",
    ),
    Code.POISONED: CodeHelp(
        "The model crashed its worker three times on this provider, so that it is not loaded there again.",
        "Use another model, provider or runtime version, or `shoal model clear MODEL`.",
    ),
    Code.SIGNATURE_REQUIRED: CodeHelp(
        "The policy or the device wants a signed model, and this one is not signed by a key that counts.",
        "Sign it and push it again: `shoal model push MODEL --signature FILE.sig`.",
    ),
    Code.REPLICAS_SHORT: CodeHelp(
        "Fewer replicas fit than the policy asks for.",
        "Follow the remedy of the constraint that is named, or add a `relax` step.",
    ),
    Code.STANDBY_SHORT: CodeHelp(
        "No device has room for the standby that the policy asks for.", "Add a node, or free memory."
    ),
    Code.NO_CANDIDATE: CodeHelp(
        "The region has no device that could be looked at.",
        "Enrol a node, and install the runtime's extra on it.",
    ),
    Code.QUOTA: CodeHelp(
        "The tenant would hold more replicas, memory or cost than its quota.",
        "Delete a workload of the tenant, or raise `spec.quota` of the Tenant.",
    ),
    Code.OUTRANKED: CodeHelp(
        "Workloads of higher priority take the room on this device.",
        "Raise `priority`, or add devices.",
    ),
    Code.PREEMPTED: CodeHelp(
        "A workload of higher priority with `preempt: always` takes its room, and it has no other place.",
        "Add a device, or raise its `priority`.",
    ),
    Code.PLAN_STALE: CodeHelp(
        "Something changed since the plan was shown, so that its hash differs now.",
        "Run `shoal plan` again, and apply the new hash.",
    ),
    Code.WORKLOAD_UNKNOWN: CodeHelp("No such workload was applied for this tenant.", "See `shoal get workloads`."),
    Code.NODE_UNKNOWN: CodeHelp("The region has no node of this name.", "See `shoal get nodes`."),
    Code.NOT_FOUND: CodeHelp("What was named does not exist.", "List what there is with `shoal get KIND`."),
    Code.IN_USE: CodeHelp(
        "A workload, session or connection still uses what is to be deleted.", "Stop that use first."
    ),
    Code.CONFLICT: CodeHelp(
        "The state does not allow the act: somebody else changed it, or a step that it needs has not happened.",
        "Read the current state, then try again.",
    ),
}

_MODELS: Final = {
    Code.MODEL_UNKNOWN: CodeHelp("The region has no model of this name or digest.", "`shoal model push FILE`."),
    Code.MODEL_INVALID: CodeHelp(
        "The file is no ONNX model that can be served, or its samples do not fit its inputs.",
        "Follow the refusal; `docs/reference/models.md` says which models are read.",
    ),
    Code.MODEL_PATH: CodeHelp(
        "A path in the push, or in the model's external data, is a link, absolute, or leaves the folder.",
        "Name regular files inside the model's folder.",
    ),
    Code.MODEL_ARCHIVE: CodeHelp(
        "The file is an archive or another format than ONNX.", "Unpack it, and push the .onnx file."
    ),
    Code.MODEL_DIGEST: CodeHelp("The bytes do not have the digest that was given.", "Push the model again."),
    Code.MODEL_TOO_LARGE: CodeHelp(
        "The model or its samples exceed a size limit.",
        "Use a smaller model or fewer samples; the limits are in `docs/reference/limits.md`.",
    ),
    Code.CUSTOM_OP_DENIED: CodeHelp(
        "The model uses operators outside the ONNX domains that the runtime ships with.",
        "Export it without custom operators.",
    ),
    Code.SOURCE_DENIED: CodeHelp(
        "A feed's URL or file is outside what the coordinator may read; or who has a model does not give it to this "
        "caller, or only without TLS.",
        "For a feed: https, a file in the signals folder, or `--signal-host`. For a model: log in, or give its digest.",
    ),
    Code.SOURCE_UNREACHABLE: CodeHelp(
        "A file, folder, feed, registry or hub cannot be read.",
        "Correct the path or URL, or repair what serves it.",
    ),
    Code.SIGNATURE_EXPIRED: CodeHelp(
        "The signature or its key has ended.", "Sign the model again with a key that is valid."
    ),
    Code.MODEL_ROLLBACK: CodeHelp(
        "A signed model has a lower version number than one that was seen here.",
        "Use the newer version, or allow this one: `shoal model clear NAME --allow VERSION`.",
    ),
    Code.PUBLISHER_UNKNOWN: CodeHelp(
        "A policy names a signing key that the Region does not declare.",
        "Add it under `spec.keys` of the Region.",
    ),
}

_SIGNALS: Final = {
    Code.SIGNAL_INVALID: CodeHelp(
        "A price or carbon feed has no value that can be read, or is too large.",
        "Correct the feed; the last good value stays in use until it is stale.",
    ),
    Code.SIGNAL_STALE: CodeHelp(
        "A feed has given no value within `stale_after`.",
        "Repair what writes the source; `fallback` applies to carbon meanwhile.",
    ),
}

_DEVICE: Final = {
    Code.DISK_FULL: CodeHelp("The node or coordinator cannot write to its disk.", "Free space."),
    Code.OUT_OF_MEMORY: CodeHelp(
        "The model needs more memory than the machine or the device had.",
        "Use a smaller variant, or free memory; the kernel's limit is not the model's fault.",
    ),
    Code.FETCH_FAILED: CodeHelp(
        "The node could not fetch the model's bytes.",
        "Nothing: it resumes by itself. Look at link and disk if it stays.",
    ),
    Code.PREPARE_FAILED: CodeHelp(
        "The model cannot be made in the wanted precision within the tolerance.",
        "Push samples that show what is served, widen the tolerance, or push a variant.",
    ),
    Code.DRIFT_OVER: CodeHelp(
        "The device computes in another precision, and its answers differ from the CPU's by more than the tolerance.",
        "Widen `tolerance`, or exclude the device.",
    ),
    Code.LOAD_FAILED: CodeHelp("The runtime refuses the model.", "See the reason that it gives, and the worker's log."),
    Code.LOAD_TIMEOUT: CodeHelp("Loading did not end in time.", "Use a smaller or simpler model."),
    Code.WARMUP_FAILED: CodeHelp(
        "The first inference did not answer.",
        "Push samples that the model takes, state `shapes`, or set `warm_up: optional`.",
    ),
    Code.WORKER_CRASHED: CodeHelp(
        "The process that ran the model ended by itself.",
        "See its log (`shoal logs NODE`); after three crashes the model is refused there.",
    ),
    Code.WORKER_KILLED: CodeHelp(
        "Something outside ended the worker, for example an operator or the machine's shutdown.",
        "Nothing: it is started again.",
    ),
    Code.WORKER_STUCK: CodeHelp(
        "The worker did not start, or did not stop when told.", "Nothing: it is ended and started again; see its log."
    ),
    Code.FRONT_STUCK: CodeHelp(
        "The process that takes requests did not answer its supervisor.", "Nothing: it is ended and started again."
    ),
    Code.COORDINATOR_STUCK: CodeHelp(
        "The coordinator's event loop stood still, or a step of its region did not end, for longer than its watchdog "
        "allows, so that it ended itself.",
        "Its service manager starts it again; report the stack in its log.",
    ),
    Code.PACE_MISSED: CodeHelp(
        "The machine is slower than the profile of the emulated device, so that its times are not the profile's.",
        "Raise `--time-scale`, or emulate fewer devices.",
    ),
    Code.RUNTIME_FAILED: CodeHelp(
        "ONNX Runtime failed on this request.", "See its message; check the request's shapes and values."
    ),
    Code.NOT_CONFINED: CodeHelp(
        "The machine lacks what keeps workers from network, files or other processes.",
        "See the guide to hardening for the kernel features that are needed.",
    ),
}

_REQUESTS: Final = {
    Code.INVALID_ARGUMENT: CodeHelp(
        "The request does not fit the model's inputs or the protocol.", "Compare it with the model's metadata."
    ),
    Code.TOO_LARGE: CodeHelp("The request or answer exceeds a limit.", "Send less at once."),
    Code.FIELD_TOO_MANY: CodeHelp(
        "The message has more fields or elements than the limit.", "Send fewer, or raw contents."
    ),
    Code.TOO_SLOW: CodeHelp("The request's bytes arrived too slowly.", "Send faster, or compress."),
    Code.OVERLOADED: CodeHelp(
        "More requests wait than are held at once.", "Retry after the time that the answer names; add replicas."
    ),
    Code.TENANT_RATE: CodeHelp(
        "The tenant sends more requests per second than its quota.",
        "Retry after the time that the answer names, or raise `quota.rate`.",
    ),
    Code.TENANT_CONCURRENCY: CodeHelp(
        "The tenant has as many requests inside the region as its quota allows.",
        "Wait for answers, or raise `quota.concurrency`.",
    ),
    Code.DEADLINE_EXCEEDED: CodeHelp("No answer came within the deadline.", "Allow more time, or retry."),
    Code.CANCELLED: CodeHelp("The client ended the request.", "Nothing."),
    Code.MODEL_NOT_FOUND: CodeHelp(
        "The caller's tenant has no workload of this name.",
        "Check name and tenant; `shoal get workloads` lists them.",
    ),
    Code.MODEL_NOT_READY: CodeHelp(
        "No replica is ready.", "Retry, or see `shoal explain WORKLOAD` for what it waits for."
    ),
    Code.SCALED_TO_ZERO: CodeHelp(
        "The replica had no request for as long as its policy says (`scale: to_zero_after`), and is unloaded. A "
        "request with a deadline that ends before it can be loaded again is refused so, and loads it.",
        "Retry after the time that the answer names, or allow a longer deadline.",
    ),
    Code.REPLICA_UNREACHABLE: CodeHelp(
        "The connection to the replica ended before an answer.", "Retry; the front avoids that replica for a while."
    ),
    Code.REQUEST_CRASHED_WORKER: CodeHelp(
        "This request ended the worker, so that it is not tried on another.",
        "Do not send it again as it is; report it with the model.",
    ),
    Code.SHM_DENIED: CodeHelp(
        "The tenant may not use this shared memory, or the memory does not hold what the request says.",
        "Grant the prefix with `--shared-memory` on that agent, or correct the region.",
    ),
    Code.UNIMPLEMENTED: CodeHelp(
        "The server does not have the method, encoding or message.", "Use one that the refusal lists."
    ),
}

_IDENTITY: Final = {
    Code.UNAUTHENTICATED: CodeHelp(
        "The caller showed no certificate or token that counts here.",
        "Give the context's certificate, or a bearer token.",
    ),
    Code.ROLE_DENIED: CodeHelp("The caller's role may not do this.", "Use a certificate of the role that is named."),
    Code.TENANT_DENIED: CodeHelp(
        "The caller asks for another tenant than its own.", "Use that tenant's certificate or token."
    ),
    Code.FORWARD_DENIED: CodeHelp(
        "A node forwarded a request that it may not forward.",
        "Check that both nodes belong to the same region and are not revoked.",
    ),
    Code.CERT_EXPIRED: CodeHelp(
        "The certificate's time has ended.", "It renews by itself while the node is up; else join or log in again."
    ),
    Code.CERT_NOT_YET_VALID: CodeHelp("The certificate's time has not begun.", "Set the clocks."),
    Code.CERT_UNTRUSTED: CodeHelp(
        "The certificate was issued by no CA that is trusted here.", "Join again, or use the files of this region."
    ),
    Code.CERT_NAME_INVALID: CodeHelp(
        "The certificate has no URI name of the form `shoal://REGION/ROLE/NAME`.", "Use one that a region issued."
    ),
    Code.CERT_REVOKED: CodeHelp("An operator revoked the certificate.", "Enrol again with a new token."),
    Code.RENEW_DENIED: CodeHelp(
        "The certificate may not be renewed: it is revoked, too old, or another key asks.", "Enrol again."
    ),
    Code.LAST_OPERATOR: CodeHelp(
        "The act would leave the region without an operator.", "Enrol another operator first, or use `--force`."
    ),
    Code.CSR_DENIED: CodeHelp(
        "The certificate request asks for something that it may not have.",
        "Let `shoal-agent join` or `shoal context login` make the request.",
    ),
    Code.TOKEN_INVALID: CodeHelp("Nobody was given this token.", "Make one: `shoal token create`."),
    Code.TOKEN_USED: CodeHelp("The token was redeemed before.", "Make a new one: `shoal token create`."),
    Code.TOKEN_EXPIRED: CodeHelp("The token's time has ended.", "Make a new one: `shoal token create`."),
    Code.TLS_REQUIRED: CodeHelp("A client or a store came without TLS.", "Use https, or give the certificates."),
    Code.NODE_MISMATCH: CodeHelp(
        "A message names another node than its sender's certificate.", "Check the rights of the MQTT broker."
    ),
    Code.REGION_MISMATCH: CodeHelp(
        "The certificate or the context belongs to another region.", "Choose that region's context or files."
    ),
    Code.SIGNATURE_INVALID: CodeHelp(
        "A signature does not match its content or key.", "Sign it again; check that the public key is the signer's."
    ),
    Code.DUPLICATE_IDENTITY: CodeHelp(
        "Two agents run with the same identity.", "Stop one; each needs a state directory of its own."
    ),
}

_LINKS: Final = {
    Code.EPOCH_STALE: CodeHelp(
        "A message comes from an earlier session of the node.", "Nothing: the agent connects again."
    ),
    Code.TERM_STALE: CodeHelp(
        "A coordinator that no longer leads sent the message.", "Nothing: the agent connects to the leader."
    ),
    Code.GENERATION_STALE: CodeHelp(
        "A desired set is older than the one that the node has.", "Nothing: the coordinator sends the newest again."
    ),
    Code.MESSAGE_INVALID: CodeHelp(
        "A message between programs cannot be read.", "Run versions that work together; see the sender's log."
    ),
    Code.MESSAGE_REPLAYED: CodeHelp(
        "A message was received before.", "Send a new one; if it recurs, look for who replays."
    ),
    Code.TOPIC_DENIED: CodeHelp(
        "An MQTT topic is not one of the node's, or the broker does not let it be read.",
        "Make the broker's configuration again: `shoal-coordinator broker-config`.",
    ),
    Code.TELEMETRY_ABSURD: CodeHelp(
        "A node reports a reading that no device can have, or another region a measurement of such.",
        "Look at the node's sensors and agent, or ask that region.",
    ),
    Code.RECEIPT_ABSURD: CodeHelp(
        "A node reports a measurement that no device can have.", "Nothing: it is measured again."
    ),
    Code.CLOCK_SKEW: CodeHelp(
        "The clocks of a node and its coordinator differ.", "Set the clocks (NTP); leases do not depend on it."
    ),
    Code.MASS_SILENCE: CodeHelp(
        "Many nodes fell silent together, which points to the network.",
        "Look at the network; replacements are paced meanwhile.",
    ),
    Code.STORE_UNAVAILABLE: CodeHelp(
        "The region's store or the agent's disk takes no writes now.",
        "Look at etcd or the disk; inference goes on.",
    ),
    Code.STORE_FULL: CodeHelp("The store is at its size limit.", "Free space or raise etcd's quota, then compact."),
    Code.STORE_CORRUPT: CodeHelp(
        "The store's content is damaged, or is an older copy than the coordinator has seen.",
        "Restore a backup: `shoal-coordinator restore`.",
    ),
    Code.STORE_DENIED: CodeHelp(
        "etcd refuses the coordinator's user.", "Grant its role: `shoal-coordinator etcd-users --scope ROLE/NAME`."
    ),
    Code.STATE_CORRUPT: CodeHelp("A file in the agent's state directory is damaged.", "Join again with a new token."),
    Code.COORDINATOR_UNREACHABLE: CodeHelp(
        "No coordinator of the region answers.", "Check address and firewall; nodes go on serving."
    ),
    Code.NOT_LEADER: CodeHelp("This coordinator does not lead.", "Nothing: clients and agents try the next address."),
    Code.CONTEXT_UNKNOWN: CodeHelp(
        "The command line knows no context of this name, or none at all.",
        "`shoal context ls`; `shoal dev up`, `shoal context login` or `shoal context add` makes one.",
    ),
    Code.CODE_UNKNOWN: CodeHelp("A newer program gave a code that this one does not know.", "Upgrade this program."),
}

_REGIONS: Final = {
    Code.FEDERATION_UNREACHABLE: CodeHelp(
        "The region is in no federation, or the federation does not answer.",
        "`shoal federation join`, or look at the federation; existing agreements go on.",
    ),
    Code.PEER_UNREACHABLE: CodeHelp(
        "The other region does not answer.", "Look at the link between the regions; it is tried again."
    ),
    Code.REGION_UNKNOWN: CodeHelp("The federation has no such region.", "See `shoal get regions`."),
    Code.TRADE_DENIED: CodeHelp(
        "A rule of one of the regions, or of the policy, forbids this trade.",
        "Check `federation.to` of the policy and `spec.trade` of the Region.",
    ),
    Code.ADVERT_INVALID: CodeHelp(
        "A region advertised what no region can have, or in a form that cannot be read.",
        "Nothing: its last good advertisement counts until it is old.",
    ),
    Code.REPLAYED: CodeHelp(
        "A signed message of a region was used before with other content.", "Send it under a new name."
    ),
    Code.BID_UNKNOWN: CodeHelp("The region made no such bid.", "Nothing: it is solicited again."),
    Code.NO_BID: CodeHelp(
        "No region offers what the policy asks, or none is better by `margin`.",
        "See `shoal explain WORKLOAD` for each region's answer.",
    ),
    Code.HOLD_SHARE: CodeHelp(
        "One region would hold more of this one's capacity than `hold_share`.",
        "Nothing: holds end within seconds. Raise `hold_share` if it recurs.",
    ),
    Code.HOLD_EXPIRED: CodeHelp(
        "The capacity kept for a bid was not awarded in time.", "Nothing: it is solicited again."
    ),
    Code.HOLD_RELEASED: CodeHelp("The capacity kept for a bid was given back.", "Nothing."),
    Code.AGREEMENT_UNKNOWN: CodeHelp(
        "A request names an agreement that is not in force here.", "Nothing: the origin routes it elsewhere."
    ),
    Code.AGREEMENT_ENDED: CodeHelp(
        "The agreement has ended.", "Nothing: the workload runs at home or is traded again."
    ),
    Code.BREACHED: CodeHelp(
        "A region did not keep what it promised in an agreement.",
        "Nothing: the workload goes elsewhere, and the region's standing falls.",
    ),
    Code.BETTER_ELSEWHERE: CodeHelp(
        "Home or another region became better by the margin.", "Nothing: the workload moves."
    ),
    Code.LEDGER_BROKEN: CodeHelp(
        "A ledger entry does not follow from the one before it.",
        "Ask that region's operator; `shoal doctor` there names the entry.",
    ),
    Code.DELEGATED: CodeHelp("Another region runs the workload.", "Nothing: `shoal get agreements` shows the terms."),
}

_MIGRATIONS: Final = {
    Code.VERIFY_FAILED: CodeHelp(
        "The new replica's answers differ by more than the tolerance, so that the move ended before any request.",
        "Widen `precision.tolerance`, or set `verify.on_fail: continue` for a model that may differ.",
    ),
    Code.VERIFY_IMPOSSIBLE: CodeHelp(
        "There is nothing to compare with: no source, no reference, or no input that both answer.",
        "Push samples with outputs, or choose other `verify.inputs`.",
    ),
    Code.NO_ROOM_FOR_BOTH: CodeHelp(
        "The device cannot hold the old and the new replica at once.",
        "Free memory, or allow a gap with `migration.allow_gap`.",
    ),
    Code.MOVE_BLOCKED: CodeHelp(
        "The same move failed recently, so that it is not tried again yet.",
        "Wait for `cooldown`, or `shoal model clear` after the cause is gone.",
    ),
    Code.MOVE_HELD: CodeHelp(
        "A better place exists, and a rule holds the replica: gain, cooldown, window or concurrency.",
        "Change `migration.when` or `windows`, or move it yourself: `shoal migrate`.",
    ),
    Code.GUARD_TRIPPED: CodeHelp(
        "During the shift the new replica failed or was slower than the guard allows; all requests went back.",
        "See `shoal describe migration ID` for the figures.",
    ),
    Code.MOVE_TIMEOUT: CodeHelp(
        "A stage of the move did not end in time, or it waited in the queue for too long.",
        "See which stage in `shoal describe migration ID`.",
    ),
    Code.MOVE_CANCELLED: CodeHelp("An operator cancelled the move.", "Nothing."),
    Code.QUEUE_FULL: CodeHelp(
        "As many moves wait in the queue, of the tenant or of the region, as may wait at a time.",
        "Wait until one begins, or take one back: `shoal migrate WORKLOAD --cancel ID`.",
    ),
    Code.MIGRATION_UNKNOWN: CodeHelp("No such migration is listed.", "See `shoal get migrations`, `shoal events`."),
    Code.SESSION_LOST: CodeHelp("No replica has the session's state.", "Begin it again with `sequence_start`."),
    Code.SESSION_MOVED: CodeHelp("The session went to another replica.", "Nothing: the front follows it."),
    Code.SESSION_STEP: CodeHelp("The step is not the next one of its session.", "Send steps in order, each once."),
    Code.SESSION_INVALID: CodeHelp(
        "A request or a document does not describe a session properly.",
        "Send `sequence_id`, with `sequence_start` at the first step; pair each state input with one output.",
    ),
    Code.LEASE_ENDED: CodeHelp(
        "The node is cut off, and may no longer advance sessions that another node may hold.",
        "Retry once it is linked, or begin the session again elsewhere.",
    ),
    Code.HANDOVER_FAILED: CodeHelp(
        "Sessions could not be handed to the new replica; the move went back.",
        "See `shoal describe migration ID`; move when fewer sessions are active.",
    ),
}

_WAITS: Final = {
    Code.WAITING_FOR_LINK: CodeHelp(
        "A node is not connected, and is told when it is.", "Wait, or look at the node's link."
    ),
    Code.WAITING_FOR_FETCH: CodeHelp("The node fetches the model's bytes.", "Wait."),
    Code.WAITING_FOR_PREPARE: CodeHelp("The node makes the model in another precision.", "Wait."),
    Code.WAITING_FOR_LOAD: CodeHelp("The runtime loads the model.", "Wait."),
    Code.WAITING_FOR_WARMUP: CodeHelp("The first inferences run.", "Wait."),
    Code.WAITING_FOR_WAKE: CodeHelp("The replica was scaled to zero, and is loaded for a request that waits.", "Wait."),
    Code.WAITING_FOR_VERIFY: CodeHelp("Answers of the old and the new replica are compared.", "Wait."),
    Code.WAITING_FOR_SHIFT: CodeHelp("Requests go to the new replica step by step.", "Wait."),
    Code.WAITING_FOR_DRAIN: CodeHelp("The old replica finishes what it has.", "Wait."),
    Code.WAITING_FOR_REPLACEMENT: CodeHelp("The replica goes once another one can take its place.", "Wait."),
    Code.WAITING_FOR_TURN: CodeHelp("Other moves are under way, and few run at once.", "Wait."),
    Code.BACKING_OFF: CodeHelp("The last try failed, and the next one has a time.", "Wait, or repair the cause."),
    Code.INTERNAL: CodeHelp(
        "A fault of Shoal itself.", "Report it with the log; `shoal support-bundle` collects what is needed."
    ),
}

CODE_GROUPS: Final[Mapping[str, Mapping[Code, CodeHelp]]] = {
    "Documents": _DOCUMENTS,
    "Command line": _COMMAND_LINE,
    "Placement": _PLACEMENT,
    "Models": _MODELS,
    "Price and carbon": _SIGNALS,
    "On a device": _DEVICE,
    "Requests": _REQUESTS,
    "Identity": _IDENTITY,
    "Links and stores": _LINKS,
    "Regions that trade": _REGIONS,
    "Moves and sessions": _MIGRATIONS,
    "Waits": _WAITS,
}
"""By who gives them, in the order of `Code`."""

CODE_HELP: Final[Mapping[Code, CodeHelp]] = {
    code: text for group in CODE_GROUPS.values() for code, text in group.items()
}
