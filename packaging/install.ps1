# Installs a packed core-node for the user who runs this: a folder, and an entry in the Start menu.
#   powershell -ExecutionPolicy Bypass -File install.ps1
$ErrorActionPreference = "Stop"
$target = Join-Path $env:LOCALAPPDATA "Programs\core-node"
Copy-Item -Recurse -Force (Join-Path $PSScriptRoot "core-node") $target
$shortcut = (New-Object -ComObject WScript.Shell).CreateShortcut(
    (Join-Path ([Environment]::GetFolderPath("Programs")) "core node.lnk"))
$shortcut.TargetPath = Join-Path $target "core-node.exe"
$shortcut.Description = "Lends this machine to a cluster of friends"
$shortcut.Save()
Write-Output "core node is in the Start menu"
