"""The node: joins a coordinator, loads its layer range, computes, leaves. Headless."""
