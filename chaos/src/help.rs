//! The kinds of faults, for the help of `phalanx-chaos`.

/// One line per kind of fault: its name and fields in a plan file, and its meaning.
pub const FAULTS: &str = "\
Faults of a plan file: [{\"at_ms\": 900, \"during\": \"healing\", \"fault\": {\"kind\": …}}, …]; `during` is optional and \
waits for taking_over, stopping, regrouping, healing or running. A member is {\"node\": 0, \"slot\": 1}, a machine {\"node\": 0} or \
{\"candidate\": 1}, a store coordinators or checkpoints.

Processes and machines:
  kill_rank {member}                         a rank process is killed
  hang_rank {member, for_ms}                 a rank process is stopped
  starve_rank {member, for_ms}               a rank process gets no processor
  slow_rank {member, factor, for_ms}         a rank computes more slowly
  fail_device {member}                       the device of a rank fails
  fail_starts {node, for_ms}                 no process of a node starts
  slander {member}                           a node reports a broken world without a cause
  kill_node {node, back_after_ms}            a machine dies and restarts
  lose_world                                 all machines of the world die and do not return, if others are enough
  isolate_world {for_ms}                     all machines of the world train on where no coordinator hears them
  drain {node, back_after_ms}                a machine is drained, taken away and restarted
  kill_coordinator {back_after_ms}           the leading coordinator dies
  pause_coordinator {for_ms}                 the leading coordinator is stopped
  suspend {machine, clock_stops, for_ms}     a machine and perhaps its clock are suspended
Networks:
  deaf_to {node, for_ms}                     messages of a node to the coordinators are lost
  mute_to {node, for_ms}                     messages of the coordinators to a node are lost
  cut_data {from, to, for_ms}                no tensors pass between two nodes
  bad_network {loss, delay_ms, for_ms}       messages are lost (percent), delayed, reordered
  strangers {n_messages, for_ms}             messages of another job and old ones arrive
Storage, clocks and data:
  fail_store {store, how, for_ms}            a store refuses, hangs or loses_answers
  skew_clock {machine, percent, for_ms}      the clock of a machine runs at 82 to 122 percent
  set_clock {machine, by_s}                  the time of day of a machine is changed
  wrong_data {node, back_after_ms, for_ms}   a machine restarts with another data set
  flip_bit {member, piece, bit}              a bit flips in the memory of a rank
Requests of the operator:
  save                                       a checkpoint
  resize {dp_shard}                          another number of shards
  reshape {pp, dp_replicate, dp_shard, tp}   another mesh";
