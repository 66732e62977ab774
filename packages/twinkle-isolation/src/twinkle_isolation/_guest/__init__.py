"""What runs on the other side: the zygote that starts sandboxes and the supervisor inside each one.

Nothing here is imported by the host process; nothing outside the standard library is imported here.
"""
