"""Model execution: paged and aligned runners, CUDA graphs, self-check, vision, pooling."""
