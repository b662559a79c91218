"""Words that every part shares: errors, the run folder, records, the world, seeds, finding a choice.

Nothing here may import another package of manyhands, and nothing imports torch when it is loaded.
"""
