"""How a client of the same machine gets the files that it shares with the sidecar.

Beside each unix socket PATH of gRPC, the sidecar listens at PATH + SUFFIX (SOCK_SEQPACKET). A client connects and sends
one slotcar.v1.PlaneHello; the sidecar answers with one slotcar.v1.PlaneWelcome and, unless that is an error, these
descriptors in this order: the region, the eventfd that wakes the sidecar, the eventfd that wakes the client, for the
direct plane the slots file, and then the slots' memory on a GPU if they are on one. From then on nothing is sent: the
connection tells each side that the other lives, and ends what the two share.
"""

from __future__ import annotations

SUFFIX = ".shm"
MESSAGE_BYTES = 16 << 10
MAX_DESCRIPTORS = 5
