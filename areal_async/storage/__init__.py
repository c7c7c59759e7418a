"""Models, tasks, checkpoints and run folders that lie in a store, such as S3, and not on a disk that hosts
share.

`urls` says what a URL is and where what it names lies here; `remote` asks one store; `transfer` brings files
and folders and puts them there, whole or not at all; `content` brings what a job names; `mirror` keeps a
run's folder in a store up to date. docs/storage.md tells how it is used.
"""
