"""Models, tasks, checkpoints and run folders that lie in a store, such as S3, and not on a disk that hosts
share.

`urls` defines URLs and their local paths; `remote` sends requests to one store; `transfer` downloads and
uploads files and folders, completely or not at all; `content` fetches the files that a job names; `mirror`
keeps a run's folder in a store up to date. docs/storage.md describes the use.
"""
