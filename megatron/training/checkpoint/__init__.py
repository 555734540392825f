"""What a run saves, where, when it is removed, and what a load takes from it."""
