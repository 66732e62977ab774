"""What the jail holds for sandboxes; `twinkle_isolation.jail` puts it there, `rootfs` takes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["BOUND_ETC", "COPIED_ETC", "DEVICES", "ROOT_POINT", "SYSTEM_PATHS", "JailLayout"]

ROOT_POINT = "/run/twinkle/root"
DEVICES = "/run/twinkle/dev"
SYSTEM_PATHS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
COPIED_ETC = (
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "protocols",
    "resolv.conf",
    "services",
)
BOUND_ETC = ("alternatives", "ca-certificates", "fonts", "ssl/certs", "ssl/openssl.cnf")

_PASSWD = """\
root:x:0:0:root:/root:/bin/bash
user:x:1000:1000:user:/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"
_PROFILE = """\
# Login shells keep the PATH they were started with.
if [ -d /etc/profile.d ]; then
  for part in /etc/profile.d/*.sh; do
    [ -r "$part" ] && . "$part"
  done
  unset part
fi
"""


@dataclass
class JailLayout:
    """What the zygote's jail offers; read once at its start."""

    binds: list[str] = field(default_factory=lambda: list[str]())
    links: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    etc: dict[str, bytes] = field(default_factory=lambda: dict[str, bytes]())

    @classmethod
    def read(cls, shares: list[str]) -> JailLayout:
        """Look at the jail's root; `shares` are directories bound beyond the usual ones."""
        layout = cls()
        for path in ("/usr", *SYSTEM_PATHS):
            if os.path.islink(path):
                layout.links[path] = os.readlink(path)
            elif os.path.isdir(path):
                layout.binds.append(path)
        for path in (*shares, *(f"/etc/{name}" for name in BOUND_ETC)):
            if os.path.exists(path):
                layout.binds.append(path)
        for name in COPIED_ETC:
            try:
                with open(f"/etc/{name}", "rb") as file:
                    layout.etc[name] = file.read(1 << 20)
            except OSError:
                continue
        if not os.path.exists("/usr/bin/python") and os.path.exists("/usr/bin/python3"):
            # Debian has no `python`; what models and documents write is `python -c ...`.
            layout.links["/opt/bin/python"] = "/usr/bin/python3"
        layout.etc["passwd"] = _PASSWD.encode()
        layout.etc["group"] = _GROUP.encode()
        layout.etc["profile"] = _PROFILE.encode()
        return layout
