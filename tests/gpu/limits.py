"""What is run, in its order, the most telling first, and how many seconds each part may take."""

LIMITS = {
    "trains_and_evaluates": 90,
    "two_processes_make_the_updates_of_one": 60,
    "the_card_computes_what_the_processor_does": 45,
    "groups_in_one_pass_are_what_each_is_alone": 45,
    "fp16_skips_alike_and_goes_on": 45,
    "a_bad_gradient_spoils_no_weight": 45,
    "half_precisions_learn": 45,
    "out_of_memory_says_what_fits": 45,
    "goes_on_to_the_same_bits": 60,
    "evaluation_is_the_same_everywhere": 45,
    "nccl_with_one_process": 45,
    "nccl_with_two_processes_on_one_card": 45,
    "launched_processes_share_a_card": 60,
    "a_peers_death_is_heard": 60,
    "a_killed_process_is_replaced": 60,
    "other_modes_make_the_same_updates": 100,
    "sync_methods_agree": 60,
    "pictures_from_a_folder_and_packed": 60,
    "a_loop_of_ones_own": 45,
    "auto_precision_is_settled": 60,
    "compiled": 90,
    "stops_when_asked_and_goes_on": 60,
    "two_cards_make_the_updates_of_one": 60,
    "two_cards_share_parameters": 60,
    "two_cards_compress_gradients": 60,
    "two_cards_hear_a_peers_death": 60,
}

BENCH = {
    "resnet18_at_32": 110,
    "cifar10_by_the_fast_recipe": 60,
    "resnet50_at_224_from_packed": 150,
    "cifar10_to_94_by_resnet18": 200,
}
