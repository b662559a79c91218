"""Time limits and intervals of launchers, agents and heartbeats, in seconds (_S). Many depend on one another.

tests/core/test_timeouts.py checks the inequalities between the limits. `manyhands explain` prints the main limits.
"""

# --- Heartbeats and stalls ---
HEARTBEAT_S = 1.0  # interval of the heartbeats of workers, agents and launchers
# An update is reported as a stall after STALL_S plus STALL_FACTOR times its usual duration: the first covers pauses of
# any update, such as those of a slow disk, the second covers long updates, whose duration varies more.
STALL_S, STALL_FACTOR = 30.0, 3.0
EVICT_S = 15.0  # a rank whose process is suspended (as its agent sees) is killed after this time, if the run recovers
# A machine without a message for this long is lost; until then, a broken connection is replaced. After a break of 8 s,
# TCP retransmits after 12.6 s; the last heartbeat may be one interval older, and busy machines are slow.
SILENT_S = 16.0
AWAITED_S = 4.0  # while the user waits for the end of the run, a machine without a message for this long is named
PAUSED_S = 3.0  # the launcher wakes ten times a second; after a longer gap, it or its machine was suspended
RECONNECT_S = 1.0  # interval between attempts to replace a broken connection to an agent, until SILENT_S is over

# --- Contacting machines ---
# ssh gives up on a machine that does not answer after SSH_CONNECT_S, and on a dead connection after 3 * SSH_ALIVE_S.
SSH_CONNECT_S, SSH_ALIVE_S = 10, 5
# First answer of an agent: ssh connects first, and Python starts slowly on a busy machine. Each ssh also uses this
# machine's CPU for a moment, to exchange keys.
HELLO_S, HELLO_EACH_S = 45.0, 0.2
REQUEST_S = 30.0  # answer of an agent to a short request
PREPARE_S = 300.0  # import of torch from a cold disk
START_WORKERS_S = 300.0  # used instead of SILENT_S until the workers have started, because they may import torch
CONTACT_S = 300.0  # all requests to a machine that rejoins or is added, instead of HELLO_S, REQUEST_S and PREPARE_S
RETRY_LEAST_S, RETRY_MOST_S = 1.0, 5.0  # pause between contacts with a lost machine: 2 % of the time since the loss
COPY_S = 120.0  # copying code or records to a machine over a slow link
STORE_S, STORE_CONNECT_S = 30.0, 10.0  # opening or checking the store on the first machine
READ_LOG_S = 20.0  # output of a process on another machine

# --- Tunnels through ssh ---
# Login of one tunnel; a request to its ssh; ending all tunnels.
TUNNEL_OPEN_S, TUNNEL_ASK_S, TUNNEL_CLOSE_S = 20.0, 10.0, 5.0
SWITCHBOARD_S = 30.0  # start of the process that listens at the addresses of machines that only ssh reaches
# All tunnels of a start: a login on a busy machine, after the connection; and the ends on each machine.
OPEN_TUNNELS_S, TUNNEL_ENDS_S = SSH_CONNECT_S + 20.0, 60.0

# --- Stopping, leaving and saving ---
LEAVE_S = 6.0  # after a worker has failed, other workers of the machine are killed this much later, unless they save
# After the workers of one machine failed, the workers of other machines are killed this long after their agents' last
# report that they are still saving.
LEAVE_OTHERS_S = 6.0
# After a machine is lost, workers of other machines are killed this much later if the run does not recover, because
# they may wait without an error; if it recovers, LEAVE_OTHERS_S applies. After a tunnel has ended, this limit always
# applies; a report of a worker that is saving extends it to LEAVE_OTHERS_S.
LEAVE_LOST_S = 2.0
SAVE_QUIET_S, SAVE_MOST_S = 30.0, 600.0  # a save fails without progress for SAVE_QUIET_S, or after SAVE_MOST_S
STOP_S = 600.0  # agents kill workers this long after a stop request, which may wait for an evaluation and a save
HUNG_S = 2.0  # a process is recognized as hung this long after a stop request, and all are killed
KILL_S = 10.0  # agents kill their workers after a second Ctrl-C
KILL_RUN_S = 20.0  # `manyhands stop --now` waits this long for a run before it kills the launcher
# An agent kills its workers this long after the last message of the launcher (SILENT_S and time for a save); if they
# are still saving, after ALONE_SAVING_S.
ALONE_S, ALONE_SAVING_S = 26.0, 30.0
LEAVING_S = 10.0  # a new start waits at most this long for each agent of an earlier start whose launcher was killed
CLAIM_S = 2.0  # a machine waits this long for another one, on the same disk, to claim the run folder

# --- Restarting and taking over ---
OPEN_FOLDER_S = 30.0  # opening the run folder on a machine
MAKE_WAY_S = 90.0  # a new launcher of a detached run waits this long for the run folder's lock, then for the agents
TAKE_OVER_S = 200.0  # the new launcher waits this long for all machines, each of which waits 2 * MAKE_WAY_S at most
# A machine that fails again soon is excluded for EXCLUDED_S, doubled with each failure up to EXCLUDED_MOST_S; a lost
# machine is not contacted during that time.
EXCLUDED_S, EXCLUDED_MOST_S = 5.0, 60.0
# The same error MOST_ALIKE times within this time ends the run; run/recovery.py has the limits that are counts.
ALIKE_S = 600.0
RESTART_S = 5.0  # estimated duration of a restart; a run that would end sooner isn't restarted for a joining machine


def time_limits() -> dict[str, float]:
    return {name.removesuffix("_S").lower(): value for name, value in globals().items() if name.endswith("_S")}
