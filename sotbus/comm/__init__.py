"""sot-comm v1 on disk: what the spec page says of the comm folder, synchronous, standard library only.

One noun a module: :mod:`.folder` (layout, permissions), :mod:`.registry` and :mod:`.registry_lock`, :mod:`.inbox` and
:mod:`.cursor`, :mod:`.identity` and :mod:`.manager_record` (who may append), :mod:`.session` and :mod:`.self_file` (who
am I), :mod:`.handles`, and over them the operations: :mod:`.membership` (join, leave), :mod:`.sending`,
:mod:`.reading`.

A cold ``sotbus send`` runs this package and nothing else, so its modules avoid the slow parts of the standard library
(``typing``, ``dataclasses``, ``pathlib``, ``subprocess``); see ``docs/adr/0002-cold-start.md``.
"""
