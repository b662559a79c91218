"""The code of worker processes, and all code of commands that computes with tensors.

`entry` joins the group, runs a task and leaves; `plan_*` search, show and time plans. The launcher imports this
package, and with it torch, only within functions.
"""
