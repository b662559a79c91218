"""The time limits of launchers, agents and heartbeats fit together."""

from manyhands.cluster.agents import heartbeats
from manyhands.core import timeouts as limits
from manyhands.parallel.group import join as group


def test_what_waits_for_something_waits_longer_than_that_may_take():
    # A machine is lost before its own processes end. TCP retransmits 12.6 s after a break of 8 s began; the last
    # heartbeat was sent up to an interval before. Its agent notices the same silence, asks its workers to save, and
    # gives them the time of every other failure.
    assert limits.SILENT_S > 12.6 + 2 * limits.HEARTBEAT_S
    assert max(limits.AWAITED_S, limits.PAUSED_S) < limits.SILENT_S < limits.REQUEST_S
    assert limits.SILENT_S + limits.LEAVE_S < limits.ALONE_S < limits.ALONE_SAVING_S
    assert min(limits.HUNG_S, heartbeats._WELL_S) > limits.HEARTBEAT_S
    # A rank that doesn't run is evicted as such, while its machine still answers.
    assert min(limits.SILENT_S, limits.STALL_S) > limits.EVICT_S
    # Every machine gives workers the same time to save, and the reason of a failure arrives before that.
    assert limits.LEAVE_S == limits.LEAVE_OTHERS_S > max(limits.LEAVE_LOST_S, group.LEARN_S)
    assert limits.SAVE_MOST_S <= limits.STOP_S
    assert limits.KILL_RUN_S > limits.KILL_S
    # An agent that takes over waits for the folder's lock, then for earlier agents; each takes up to MAKE_WAY_S.
    assert limits.TAKE_OVER_S > 2 * limits.MAKE_WAY_S > 2 * limits.ALONE_SAVING_S
    assert limits.OPEN_FOLDER_S > limits.CLAIM_S + limits.LEAVING_S > limits.CLAIM_S + limits.LEAVE_S
    # A machine is given up only after its ssh and its Python had their time.
    assert limits.CONTACT_S >= limits.PREPARE_S == limits.START_WORKERS_S > limits.HELLO_S > limits.SSH_CONNECT_S
    assert max(limits.SSH_CONNECT_S, limits.TUNNEL_OPEN_S) < limits.OPEN_TUNNELS_S
    assert limits.TUNNEL_ENDS_S > limits.SWITCHBOARD_S
    assert limits.STORE_S > limits.STORE_CONNECT_S
    # Retries and exclusions grow.
    assert max(limits.RECONNECT_S, limits.RETRY_MOST_S) < limits.SILENT_S
    assert limits.RETRY_LEAST_S < limits.RETRY_MOST_S
    assert limits.EXCLUDED_S < limits.EXCLUDED_MOST_S < limits.ALIKE_S
