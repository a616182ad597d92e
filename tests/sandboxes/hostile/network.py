"""Network and IPC: each program tries to reach the host or its resources.

Environment variables: `HOST_PORT` is a listener on the host's loopback, `HOST_SOCKET` an abstract Unix socket of
the host, `HOST_KEY` the key of shared memory of the host. No program sends to any other address.
"""

from tests.sandboxes.hostile.program import isolation_check

PROGRAMS = [
    isolation_check(
        "looks_for_a_way_out",
        """
            import socket
            holds(f"{socket.if_nameindex()}", [name for _, name in socket.if_nameindex()] == ["lo"])
            with open("/proc/net/route") as file:
                holds("no route", len(file.readlines()) == 1)
            with open("/proc/net/ipv6_route") as file:
                holds("no route of six", all(line.split()[-1] == "lo" for line in file))
            with open("/proc/net/dev") as file:
                holds("one device", [line.split(":")[0].strip() for line in file if ":" in line] == ["lo"])
            with open("/proc/net/unix") as file:
                holds("no socket of the host", len(file.readlines()) <= 3)
        """,
    ),
    isolation_check(
        "connects_to_itself",
        """
            import socket
            for family, where in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
                server = socket.create_server((where, 0), family=family)
                one = socket.create_connection(server.getsockname()[:2], timeout=5)
                other, _ = server.accept()
                one.sendall(b"hello")
                holds(where, other.recv(5) == b"hello")
        """,
    ),
    isolation_check(
        "connects_to_the_host",
        """
            import socket
            for name, where in (("HOST_PORT", "127.0.0.1"), ("HOST_PORT", "127.0.0.2"), ("HOST_PORT", "0.0.0.0")):
                fails(where, socket.create_connection, (where, int(os.environ[name])), 2)
        """,
    ),
    isolation_check(
        "sends_where_no_route_leads",
        # refused by the kernel before anything is sent: 192.0.2.0/24 and 2001:db8::/32 belong to nobody
        """
            import socket
            for family, where in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
                one = socket.socket(family, socket.SOCK_DGRAM)
                fails(where, one.connect, (where, 9), allowed=(errno.ENETUNREACH, errno.EADDRNOTAVAIL))
        """,
    ),
    isolation_check(
        "connects_to_a_socket_of_the_host",
        """
            import socket
            one = socket.socket(socket.AF_UNIX)
            fails("abstract", one.connect, "\\0" + os.environ["HOST_SOCKET"], allowed=(errno.ECONNREFUSED,))
            for path in ("/run/dbus/system_bus_socket", "/run/systemd/journal/socket", "/tmp/.X11-unix/X0",
                         "/var/run/docker.sock", "/run/containerd/containerd.sock"):
                fails(path, socket.socket(socket.AF_UNIX).connect, path)
        """,
    ),
    isolation_check(
        "opens_raw_sockets",
        """
            import socket
            for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 1),
                                           (socket.AF_INET, socket.SOCK_RAW, 255),
                                           (socket.AF_INET6, socket.SOCK_RAW, 58), (socket.AF_INET, 10, 0x0300),
                                           (17, socket.SOCK_RAW, 0x0300), (17, socket.SOCK_DGRAM, 0x0300)):
                fails(f"{family} {kind}", socket.socket, family, kind, protocol)
        """,
    ),
    isolation_check(
        "changes_the_network",
        """
            import fcntl, socket
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            for name, request in (("flags", 0x8914), ("address", 0x8916), ("mtu", 0x8922), ("route", 0x890B),
                                  ("bridge", 0x89A0), ("tunnel", 0x89F1)):
                fails(name, fcntl.ioctl, one, request, struct.pack("16s24x", b"lo"))
            fails("mark", one.setsockopt, socket.SOL_SOCKET, 36, 1)
            fails("device", one.setsockopt, socket.SOL_SOCKET, 25, b"eth0\\0")
            route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
            # a new dummy interface
            body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH4x", 8, 3)
            route.send(struct.pack("IHHII", 16 + len(body), 16, 5 | 0x600, 1, 0) + body)
            holds("netlink", struct.unpack_from("i", route.recv(4096), 16)[0] < 0)
            for path in ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/rp_filter"):
                if os.path.exists(path):
                    fails(path, os.open, path, os.O_WRONLY)
        """,
    ),
    isolation_check(
        "attaches_shared_memory_of_the_host",
        """
            refused("shmget", call(nr["shmget"], int(os.environ["HOST_KEY"]), 4096, 0), errno.ENOENT)
            for name in ("shm", "msg", "sem"):
                with open(f"/proc/sysvipc/{name}") as file:
                    holds(f"sysv {name}", len(file.readlines()) == 1)
            for at in range(64):
                refused("shmat", call(nr["shmat"], at, 0, 0), errno.EINVAL, errno.EIDRM)
            holds("posix", os.listdir("/dev/shm") == [])
            refused("mq_open", call(nr["mq_open"], b"rookery-host", 0, 0, None), errno.ENOENT)
        """,
    ),
]
