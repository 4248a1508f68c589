// Renders a chart as `helm template` does, for machines without Helm: Go templates, sprig and the
// functions of Helm that the chart uses; a function that is not here is an error.
//
// Usage: renderer CHART < values.json, with {"Values": ..., "Chart": ..., "Release": ...} on the
// standard input. Prints the rendered templates as one JSON object, by path.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

// files is the chart's `.Files`.
type files map[string][]byte

// Get returns the text of a file, or nothing where there is none.
func (f files) Get(name string) string { return string(f[name]) }

// Glob returns the files whose paths match.
func (f files) Glob(pattern string) files {
	found := files{}
	for name, content := range f {
		if ok, _ := path.Match(pattern, name); ok {
			found[name] = content
		}
	}
	return found
}

func read(chart string) (files, error) {
	all := files{}
	err := filepath.Walk(chart, func(name string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		relative, err := filepath.Rel(chart, name)
		if err != nil {
			return err
		}
		all[filepath.ToSlash(relative)], err = os.ReadFile(name)
		return err
	})
	return all, err
}

func toYAML(value interface{}) (string, error) {
	text, err := yaml.Marshal(value)
	return strings.TrimSuffix(string(text), "\n"), err
}

func fromYAML(text string) (map[string]interface{}, error) {
	value := map[string]interface{}{}
	err := yaml.Unmarshal([]byte(text), &value)
	return value, err
}

func required(message string, value interface{}) (interface{}, error) {
	if value == nil || value == "" {
		return value, fmt.Errorf("%s", message)
	}
	return value, nil
}

func newTemplates() *template.Template {
	root := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	// As in Helm: what a chart renders must not hang on the machine.
	delete(functions, "env")
	delete(functions, "expandenv")
	functions["toYaml"] = toYAML
	functions["fromYaml"] = fromYAML
	functions["required"] = required
	functions["include"] = func(name string, data interface{}) (string, error) {
		text := &strings.Builder{}
		err := root.ExecuteTemplate(text, name, data)
		return text.String(), err
	}
	functions["tpl"] = func(source string, data interface{}) (string, error) {
		copied, err := root.Clone()
		if err != nil {
			return "", err
		}
		parsed, err := copied.New("tpl").Parse(source)
		if err != nil {
			return "", err
		}
		text := &strings.Builder{}
		err = parsed.Execute(text, data)
		return text.String(), err
	}
	return root.Funcs(functions)
}

func render(chart string, context map[string]interface{}) (map[string]string, error) {
	all, err := read(chart)
	if err != nil {
		return nil, err
	}
	others, root := files{}, newTemplates()
	for name, content := range all {
		if !strings.HasPrefix(name, "templates/") {
			others[name] = content
		} else if _, err := root.New(name).Parse(string(content)); err != nil {
			return nil, err
		}
	}
	context["Files"] = others
	rendered := map[string]string{}
	for name := range all {
		if !strings.HasPrefix(name, "templates/") || strings.HasPrefix(path.Base(name), "_") {
			continue
		}
		text := &strings.Builder{}
		if err := root.ExecuteTemplate(text, name, context); err != nil {
			return nil, err
		}
		rendered[name] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return rendered, nil
}

func main() {
	context := map[string]interface{}{}
	err := json.NewDecoder(os.Stdin).Decode(&context)
	if err == nil {
		var rendered map[string]string
		if rendered, err = render(os.Args[1], context); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(rendered)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
