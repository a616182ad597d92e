# configures the test runner to load its own plug-in and to select no test
printf 'import os\nos._exit(0)\n' > evil_plugin.py
printf '[pytest]\naddopts = -p evil_plugin\npython_files = none\n' > pytest.ini; cp pytest.ini tox.ini
printf '\n[tool:pytest]\naddopts = -p evil_plugin\n' >> setup.cfg
printf '\n[tool.pytest.ini_options]\naddopts = "-p evil_plugin"\n' >> pyproject.toml
printf '[run]\nplugins = evil_plugin\n' > .coveragerc; printf 'module.exports={testMatch:[]}' > jest.config.js
