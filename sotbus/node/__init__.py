"""The daemon of one user on one box: it owns a comm folder, answers for it, and carries mail over links."""
