"""How tools, environments and rollouts wait: threads, event loops, time limits.

Private to the Twinkle distributions; nothing here is a public interface. After first use a process
must not be forked (start children with `spawn`): threads do not survive a fork.
"""
