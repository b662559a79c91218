"""The time limits of launchers, agents and heartbeats fit together."""

from manyhands.cluster.agents import heartbeats
from manyhands.core import timeouts as limits
from manyhands.parallel.group import join as group


def test_a_machine_is_lost_before_its_own_processes_end():
    # TCP retransmits 12.6 s after a break of 8 s began; the last heartbeat was sent up to an interval before.
    assert limits.SILENT_S > 12.6 + 2 * limits.HEARTBEAT_S
    assert limits.AWAITED_S < limits.SILENT_S
    assert limits.PAUSED_S < limits.SILENT_S
    # Its agent notices the same silence, asks its workers to save, and gives them the time of every other failure.
    assert limits.SILENT_S < limits.SILENT_S + limits.LEAVE_S < limits.ALONE_S < limits.ALONE_SAVING_S
    # A rank that doesn't run is evicted as such, while its machine still answers.
    assert limits.EVICT_S < limits.SILENT_S
    assert limits.STALL_S > limits.EVICT_S


def test_every_machine_gives_workers_the_same_time_to_save():
    assert limits.LEAVE_S == limits.LEAVE_OTHERS_S > limits.LEAVE_LOST_S
    assert group.LEARN_S < limits.LEAVE_S, "the reason of a failure arrives before its consequences are ended"
    assert limits.SAVE_MOST_S <= limits.STOP_S, "a stop lets a save end"
    assert limits.HUNG_S > limits.HEARTBEAT_S
    assert heartbeats._WELL_S > limits.HEARTBEAT_S
    assert limits.KILL_RUN_S > limits.KILL_S


def test_a_take_over_waits_for_the_processes_that_make_way():
    # An agent waits for the folder's lock, then for earlier agents; each takes up to MAKE_WAY_S.
    assert limits.TAKE_OVER_S > 2 * limits.MAKE_WAY_S
    assert limits.MAKE_WAY_S > limits.ALONE_SAVING_S
    assert limits.OPEN_FOLDER_S > limits.CLAIM_S + limits.LEAVING_S
    assert limits.LEAVING_S > limits.LEAVE_S


def test_a_machine_is_given_up_only_after_its_ssh_and_its_python_had_their_time():
    assert limits.HELLO_S > limits.SSH_CONNECT_S
    assert limits.REQUEST_S > limits.SILENT_S, "a lost machine is named as lost, not as slow"
    assert limits.CONTACT_S >= limits.PREPARE_S > limits.HELLO_S
    assert limits.PREPARE_S == limits.START_WORKERS_S
    assert limits.OPEN_TUNNELS_S > limits.SSH_CONNECT_S
    assert limits.OPEN_TUNNELS_S > limits.TUNNEL_OPEN_S
    assert limits.TUNNEL_ENDS_S > limits.SWITCHBOARD_S
    assert limits.STORE_S > limits.STORE_CONNECT_S


def test_retries_and_exclusions_grow():
    assert limits.RECONNECT_S < limits.SILENT_S
    assert limits.RETRY_LEAST_S < limits.RETRY_MOST_S < limits.SILENT_S
    assert limits.EXCLUDED_S < limits.EXCLUDED_MOST_S < limits.ALIKE_S
