"""What runs on the other side: the zygote that starts sandboxes and the supervisor inside each one.

Nothing outside the standard library is imported here. Of it the host imports the system call filter
alone, to say whether there is one.
"""
