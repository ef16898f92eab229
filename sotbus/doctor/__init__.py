"""``sotbus doctor``: whether this box can do its job, judged by reading alone.

:mod:`.check` is the value, :mod:`.place` what is examined, :mod:`.checkup` the list of checks and the run over them;
the checks themselves are in one module a noun. :mod:`.probe` is the one part that writes: it proves the lock with real
processes, on files of its own. Every name, what it means and its remedy are in ``docs/doctor.md``.
"""
