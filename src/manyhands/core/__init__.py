"""What several packages share: errors, files, the run folder, records, the mesh, seeds, finding a choice.

No module here imports another package of manyhands, and only `devices` imports torch.
"""
