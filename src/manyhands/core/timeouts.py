"""Time limits and intervals of launchers, agents and heartbeats, which depend on one another; in seconds.

tests/core/test_timeouts.py checks the inequalities between them. `manyhands explain` prints the most important ones.
"""

# --- Heartbeats and stalls ---

# Interval of the heartbeats of workers, agents and launchers.
HEARTBEAT_S = 1.0
# A step that takes STALL_S longer than STALL times the usual is a stall.
STALL_S, STALL = 30.0, 3.0
# A rank that does not run at all for this long is evicted, if the run can continue without it.
EVICT_S = 15.0
# A peer that is silent for longer is lost. After a break of 8 s TCP retransmits after 12.6 s; the last heartbeat was
# sent up to an interval before the break, and busy machines are slow.
SILENT_S = 16.0
# A machine that is silent for this long while the user waits for the end of the run is named.
AWAITED_S = 4.0
# The launcher looks ten times a second; after a longer gap it was itself suspended, or its machine slept.
PAUSED_S = 3.0
# Interval between two attempts to reconnect.
RECONNECT_S = 1.0

# --- Contacting machines ---

# ssh gives up on a machine that doesn't answer; it notices a dead connection after three times ALIVE_S.
SSH_CONNECT_S, SSH_ALIVE_S = 10, 5
# First answer of an agent: ssh connects first, and Python starts slowly on a busy machine. Each ssh also takes this
# machine's processor for a moment, to agree on keys.
HELLO_S, HELLO_EACH_S = 45.0, 0.2
# Answer of an agent to a short request.
REQUEST_S = 30.0
# Importing torch from a cold disk, and starting workers, which may have to do that.
PREPARE_S = START_WORKERS_S = 300.0
# All questions to a machine that rejoins or is added; importing torch may take most of it.
CONTACT_S = 300.0
# Pause between two attempts to contact a lost machine: from, to.
RETRY_LEAST_S, RETRY_MOST_S = 1.0, 5.0
# Copying code or records to a machine over a slow link.
COPY_S = 120.0
# Opening or checking the store on the first machine.
STORE_S, STORE_CONNECT_S = 30.0, 10.0
# Output of a process on another machine.
READ_LOG_S = 20.0

# --- Tunnels through ssh ---

# Login of one tunnel; a request to its ssh; ending all tunnels.
TUNNEL_OPEN_S, TUNNEL_ASK_S, TUNNEL_CLOSE_S = 20.0, 10.0, 5.0
SWITCHBOARD_S = 30.0
# All tunnels of a start: a login on a busy machine, after the connection; and the ends on each machine.
OPEN_TUNNELS_S, TUNNEL_ENDS_S = SSH_CONNECT_S + 20.0, 60.0

# --- Stopping, leaving and saving ---

# Workers notice a peer's failure at their next collective, and save then.
LEAVE_S = 6.0
# When the workers of one machine failed, those of the others are killed this long after their agents' last report that
# they are still saving.
LEAVE_OTHERS_S = 6.0
# The peers of a lost machine may wait for it without an error.
LEAVE_LOST_S = 2.0
# A save without progress for this long is given up, as is one that takes longer than SAVE_MOST_S.
SAVE_QUIET_S, SAVE_MOST_S = 30.0, 600.0
# A requested stop waits for an evaluation and a save.
STOP_S = 600.0
# By this time after a stop request a hung process is recognised; others get the time they need.
HUNG_S = 2.0
# Agents kill their workers after a second Ctrl-C.
KILL_S = 10.0
# `manyhands stop --now` waits this long for a run before it kills the launcher.
KILL_RUN_S = 20.0
# Workers that lost their launcher are killed this long after its last sign; those that are saving get longer.
ALONE_S, ALONE_SAVING_S = 26.0, 30.0
# Agents of an earlier start whose launcher was killed: their workers save and leave.
LEAVING_S = 10.0
# A machine of the same run that shares the disk has written by then that the folder is the run's.
CLAIM_S = 2.0

# --- Restarting and taking over ---

# Opening the run folder on a machine.
OPEN_FOLDER_S = 30.0
# Processes of a detached run save and leave for a new launcher: on the machine of the lock, and once more for its
# agents.
MAKE_WAY_S = 90.0
# The new launcher waits for that.
TAKE_OVER_S = 200.0
# A machine that fails again soon is excluded: for this long at first, and at most.
EXCLUDED_S, EXCLUDED_MOST_S = 5.0, 60.0
# The same error this often (see run/recovery.py) within this time ends the run.
ALIKE_S = 600.0
# Time of a restart; a run that would end sooner is not restarted for a machine that could join.
RESTART_S = 5.0


def time_limits() -> dict[str, float]:
    """Returns all time limits by name."""
    return {name.removesuffix("_S").lower(): value for name, value in globals().items() if name.endswith("_S")}
