"""The tests, in tiers by what they need: pure, virtual, gloo, peer, gpu."""
