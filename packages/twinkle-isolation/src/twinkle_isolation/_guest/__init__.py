"""What runs on the other side: the zygote that starts sandboxes and the supervisor inside each one.

Nothing outside the standard library is imported here. The host imports two modules of it: `layout`,
to build the jail, and `seccomp`, to say whether there is a system call filter.
"""
