"""Names, paths and sizes that the injected pieces, the checks of a pod and the documentation share."""

from __future__ import annotations

PREFIX = "slotcar.dev/"
LABEL = PREFIX + "inject"
METRICS_LABEL = PREFIX + "metrics"
STATUS = PREFIX + "status"
# The cluster autoscaler's: which volumes a pod may lose with its node.
EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"

CONTAINER = "slotcar"
METRICS_PORT = "slotcar-metrics"
HEALTH_PORT = "slotcar-health"

RUN_VOLUME, RUN_PATH = "slotcar-run", "/run/slotcar"
TMP_VOLUME, TMP_PATH = "slotcar-tmp", "/tmp"  # noqa: S108 - a volume of the sidecar's own
DISK_VOLUME, DISK_PATH = "slotcar-disk", "/var/lib/slotcar"
HUB_VOLUME, HUB_PATH = "slotcar-hub", "/var/cache/slotcar"
ADAPTERS_VOLUME, ADAPTERS_PATH = "slotcar-adapters", "/etc/slotcar/adapters"
POLICY_VOLUME, POLICY_PATH = "slotcar-policy", "/etc/slotcar/policy"
SPEC_VOLUME, SPEC_PATH = "slotcar-model-spec", "/etc/slotcar/model-spec"
OPTIONS_VOLUME, OPTIONS_PATH = "slotcar-source-options", "/etc/slotcar/source-options"
VOLUMES = frozenset(
    {
        *(RUN_VOLUME, TMP_VOLUME, DISK_VOLUME, HUB_VOLUME),
        *(ADAPTERS_VOLUME, POLICY_VOLUME, SPEC_VOLUME, OPTIONS_VOLUME),
    }
)
# Where a volume of the pod would hide the sidecar's own, or its program.
RESERVED_PATHS = (
    *(RUN_PATH, TMP_PATH, DISK_PATH, HUB_PATH, "/etc", "/proc", "/sys", "/dev"),
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt"),
)

TARGET_VARIABLE = "SLOTCAR_TARGET"
TARGET = f"unix://{RUN_PATH}/slotcar.sock"

# The volume of the sockets, in memory; regions of shared memory have no names and are not in it.
RUN_BYTES = 16 << 20
TMP_BYTES = 1 << 30
# Beside the disk tier's entries: one that is being written, and the journal.
DISK_SPARE_BYTES = 3 << 30
# What the process takes before there is anything in it: the interpreter, torch and their threads.
PROCESS_BYTES = 512 << 20

# What the sidecar keeps of the pod's grace period to close its sockets and write its journal.
MARGIN_SECONDS = 5
