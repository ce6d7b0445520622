"""From logits to tokens: sampler, top-k, grammar masks, copies to the host."""
